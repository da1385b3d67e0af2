"""How busy each lane was during a step, and which one held the others up.

Owns the sums. Told of every task by the lanes; asked by the engine at the end of a step.
"""

import threading

from lohan.schedule.task import Task
from lohan.vocabulary import Lane

_WORDS = {
    Lane.GPU: "GPU compute",
    Lane.GPU_TO_RAM: "copies from GPU to RAM",
    Lane.RAM_TO_GPU: "copies from RAM to GPU",
    Lane.SSD_READ: "SSD reads",
    Lane.SSD_WRITE: "SSD writes",
    Lane.CPU: "CPU updates",
    Lane.PEER: "copies between GPUs",
}


class LaneLoad:
    """Busy seconds per lane since `begin`. Runs on: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: dict[Lane, float] = {}
        self._began = 0.0
        self.bottleneck = ""

    def begin(self, now: float) -> None:
        """A step begins."""
        with self._lock:
            self._busy = {}
            self._began = now

    def add(self, task: Task, start: float, end: float) -> None:
        """A task has ended."""
        with self._lock:
            seconds = end - max(start, self._began)
            self._busy[task.lane] = self._busy.get(task.lane, 0.0) + max(0.0, seconds)

    def end(self, now: float) -> dict[str, float]:
        """Shares of the step's time; also says what the bottleneck was."""
        with self._lock:
            whole = max(1e-9, now - self._began)
            busy = {lane: min(1.0, seconds / whole) for lane, seconds in self._busy.items()}
        lane = max(busy, key=lambda one: busy[one], default=None)
        self.bottleneck = f"{_WORDS[lane]} ({busy[lane]:.0%} of the step)" if lane else ""
        return {str(one): share for one, share in busy.items()}
