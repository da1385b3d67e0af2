"""What the next step will take, and when another plan is worth a thought.

Owns how often steps are simulated (predicting must not slow training down) and after which steps
the machine is looked at anew. What is learned is in `simulate.learned`; the engine plans.
"""

import time
from collections.abc import Sequence

from lohan.engine.planning.plan_run import PlannedRun
from lohan.hardware.machine import Machine
from lohan.simulate import SimulatedStep, simulate_plan
from lohan.simulate.learned import LearnedTimes, TimedTask

_FIRST_LEARNED_STEP = 2
"""Of the process: the first one touches memory and files for the first time."""
_REPLANNED_STEPS = (4, 32, 256)
"""After these, and after each further multiple of the last, another plan may be taken: often enough
to follow a drive whose cache fills up, too seldom to follow noise."""
_NUM_PROMPT_STEPS = 10
"""Of the process: so many predictions are made whatever they cost."""
_MOST_SHARE = 0.02
"""Of the time of steps, for predicting them."""


class Predictions:
    """Of one engine. Runs on: the main thread."""

    def __init__(self) -> None:
        self._times = LearnedTimes()
        self._num_steps = 0
        self._steps_seconds = self._own_seconds = 0.0
        self._made: SimulatedStep | None = None
        self._is_stale = True

    @property
    def has_learned(self) -> bool:
        """Whether predictions rest on what steps have shown."""
        return self._times.num_steps > 0

    def plan_changes(self, *, is_same_size: bool) -> None:
        """Another plan is run. Tasks of the same batches take as long as before."""
        self._made, self._is_stale = None, True
        if not is_same_size:
            self._times.clear()

    def of(self, planned: PlannedRun) -> SimulatedStep:
        """What the simulator says a step takes, by what is known by now."""
        if self._made is None or (self._is_stale and self._may_predict()):
            started = time.perf_counter()
            plan, machine = planned.plan, planned.machine
            durations = self._times.durations(machine, plan.system.rates)
            self._made = simulate_plan(plan, machine, durations=durations)
            self._is_stale = False
            self._own_seconds += time.perf_counter() - started
        return self._made

    def before_step(self, planned: PlannedRun) -> float | None:
        """Seconds the step that begins should take, if anybody has asked for predictions."""
        return None if self._made is None else self.of(planned).step_seconds

    def learn(
        self, ran: Sequence[TimedTask], seconds: float, planned: PlannedRun, launch_seconds: float
    ) -> None:
        """A step has ended; the last as `LearnedTimes.add` takes it."""
        self._num_steps += 1
        self._steps_seconds += seconds
        if self._num_steps >= _FIRST_LEARNED_STEP:
            self._times.add(ran, planned.machine, planned.plan.system.rates, launch_seconds)
            self._is_stale = True

    def machine_to_plan_for(self, planned: PlannedRun) -> Machine | None:
        """The machine as it is known by now, after steps that may be followed by another plan."""
        is_due = self._num_steps in _REPLANNED_STEPS or not self._num_steps % _REPLANNED_STEPS[-1]
        if not is_due or not self.has_learned:
            return None
        return self._times.machine(planned.machine, planned.plan.system.rates)

    def _may_predict(self) -> bool:
        is_prompt = self._num_steps <= _NUM_PROMPT_STEPS
        return is_prompt or self._own_seconds <= _MOST_SHARE * self._steps_seconds
