"""A better plan for a run that is going on, once its machine is known better.

Owns when another plan is worth it. States that live in RAM stay there. Called by the engine after
steps that have shown what the machine can do.
"""

from lohan.engine.planning.plan_run import PlannedRun, seconds_of
from lohan.engine.run_setup import RunSetup
from lohan.errors import DoesNotFit

_CLEARLY_FASTER = 0.9
"""Medians of a few steps vary by less than a tenth on a machine that is left alone."""


def faster_plan(setup: RunSetup, before: PlannedRun) -> PlannedRun | None:
    """A plan that is clearly faster on the machine as it is known by now, if there is one."""
    if callable(setup.options.policy):
        return None
    try:
        planned = setup.plan(before.plan.shape, before.sizes)
    except DoesNotFit:
        # Beside what lives in RAM by now there may be room for no other plan: this one runs.
        return None
    is_faster = planned.seconds < _CLEARLY_FASTER * seconds_of(before.plan, setup.machine)
    return planned if is_faster else None
