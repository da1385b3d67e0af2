"""Driven tasks whose work is queued on the device, in their order, and when each of them ran.

Owns the list and the times, which are the device's own: points of compute are recorded while tasks
are launched, and read once they are done. Used by `executor`, with its lock held where it says so.
"""

from collections import deque
from dataclasses import dataclass

from lohan.device.device import ComputeQueue, Event
from lohan.schedule.task import Task


@dataclass(frozen=True, slots=True)
class Launch:
    """One of them."""

    task: Task
    began: Event
    done: Event
    launched_at: float
    """When the host was done with it, by the clock of the lanes."""


class Launched:
    """What the host is ahead by."""

    def __init__(self, queue: ComputeQueue) -> None:
        self._queue = queue
        self._tasks: deque[Launch] = deque()
        self._zero: tuple[Event, float] | None = None
        """A point of compute, and when that was by the clock of the lanes."""
        self._last_done: Event | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def first(self) -> Launch:
        """The one that will be done next."""
        return self._tasks[0]

    def behind(self, task: Task) -> list[str]:
        """Names of tasks launched after one."""
        return [one.task.name for one in self._tasks if one.task.id > task.id]

    def compare_clocks(self, now: float) -> None:
        """Whenever nothing is queued: a point of compute recorded now is done now."""
        if not self._tasks:
            self._last_done = self._queue.record()
            self._zero = (self._last_done, now)

    def begin(self, *, has_waited: bool) -> Event:
        """A task begins where the one before it ended; if it had to wait for other lanes, here."""
        if has_waited or self._last_done is None:
            return self._queue.record()
        return self._last_done

    def end(self) -> Event:
        """All work of a task is queued."""
        self._last_done = self._queue.record()
        return self._last_done

    def add(self, launch: Launch) -> None:
        """With the lock held."""
        self._tasks.append(launch)

    def remove(self, task: Task) -> None:
        """With the lock held: a task is done, if it was launched."""
        if self._tasks and self._tasks[0].task is task:
            self._tasks.popleft()

    def wait(self, launch: Launch) -> tuple[float, float]:
        """Wait until a launched task is done; when it began and ended.

        Raises:
            HardwareError: the device failed, in this task or in one launched behind it.
        """
        self._queue.wait(launch.done)
        assert self._zero is not None
        zero, zero_seconds = self._zero
        began, ended = (
            zero_seconds + self._queue.seconds_between(zero, point)
            for point in (launch.began, launch.done)
        )
        return began, ended
