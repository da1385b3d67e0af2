"""The profiling step: what a real step shows about the machine, and whether to plan again.

Owns the choice of the step that is watched. The arithmetic is `simulate.refine`; the engine plans.
"""

from lohan.hardware.machine import Machine
from lohan.runtime.planning import PlannedRun
from lohan.schedule.task import Task
from lohan.simulate import refine
from lohan.trace import Recorder

_WATCHED_STEP = 2
"""Of the process: the first one touches memory and files for the first time."""


class ProfilingStep:
    """Watches one step of the lanes. Runs on: the main thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._was_on = recorder, recorder.is_on
        self._num_steps = 0
        self._tasks: list[Task] = []

    def begin(self, tasks: tuple[Task, ...]) -> None:
        """A step begins."""
        self._num_steps += 1
        if self._num_steps == _WATCHED_STEP:
            self._recorder.is_on = True
            self._tasks = list(tasks)

    def end(self, planned: PlannedRun) -> Machine | None:
        """A step has ended: the machine with the rates it showed, once."""
        if self._num_steps != _WATCHED_STEP:
            return None
        trace = self._recorder.trace("profiling step")
        if not self._was_on:
            self._recorder.is_on = False
            self._recorder.clear()
        tasks, self._tasks = self._tasks, []
        return refine(
            planned.machine,
            tasks,
            trace,
            rates=planned.plan.system.rates,
            steps=[tasks[-1].step],
        )
