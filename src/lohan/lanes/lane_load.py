"""Which tasks ran during a step, and when.

Owns the list. Told of every task by the lanes; asked by the engine at the end of a step.
"""

import threading

from lohan.schedule.task import Task
from lohan.simulate.learned import TimedTask
from lohan.vocabulary import Lane


class LaneLoad:
    """Tasks that ended since `begin`. Runs on: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ran: list[TimedTask] = []
        self._began = 0.0
        self.starved_seconds = 0.0
        """Of tasks that the device was done with as soon as all of their work was launched."""

    def begin(self, now: float) -> None:
        """A step begins; what ended before it is no part of it."""
        with self._lock:
            self._ran = []
            self._began = now
            self.starved_seconds = 0.0

    def add(self, task: Task, start: float, end: float, *, is_starved: bool = False) -> None:
        """A task has ended; `is_starved`: the device has waited for the host to launch it."""
        with self._lock:
            self.starved_seconds += is_starved * (end - start)
            self._ran.append((task, start, end))

    def end(self, now: float) -> tuple[list[TimedTask], dict[str, float]]:
        """The tasks, and the share of the step's time each lane was at work."""
        with self._lock:
            ran, began = self._ran, self._began
        busy: dict[Lane, float] = {}
        for task, start, end in ran:
            busy[task.lane] = busy.get(task.lane, 0.0) + max(0.0, end - max(start, began))
        whole = max(1e-9, now - began)
        return ran, {str(lane): min(1.0, seconds / whole) for lane, seconds in busy.items()}
