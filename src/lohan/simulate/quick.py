"""A shorter simulation for comparing many plans: fewer steps, no checks.

Step times equal those of `simulate_plan`; only what proves the schedule is left out. Called to
judge plans, for what-ifs and sweeps; whoever tells its step as an answer checks the schedule.
"""

import contextlib
import gc
from collections.abc import Iterator

from lohan.hardware.machine import Machine
from lohan.plan.plan import Plan
from lohan.schedule.build import build_schedule
from lohan.simulate.clock import Clock
from lohan.simulate.durations import Durations
from lohan.simulate.result import SimulatedStep
from lohan.simulate.simulator import NUM_STEADY_STEPS, read_off

QUICK_STEPS = NUM_STEADY_STEPS + 3
"""Two steps before the measured one, one after it."""


def quick_step(plan: Plan, machine: Machine) -> SimulatedStep:
    """Predict one step of a plan in the steady state, unchecked.

    Raises:
        ScheduleError: if the tasks cannot run.
    """
    rates = plan.system.rates
    with uncollected():
        num_steps = 2 if plan.system.has_barrier else QUICK_STEPS
        schedule = build_schedule(plan, num_steps=num_steps)
        clock = Clock(schedule, Durations(machine, rates), machine, rates)
        times = clock.run(by_priority=True, through_step=max(1, num_steps - 2))
        return read_off(schedule, times, plan, machine)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: ten thousand tasks make no cycles, and looking for some takes as long
    as a third of making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
