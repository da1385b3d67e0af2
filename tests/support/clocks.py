"""A clock that moves only when a test says so."""

import threading


class ManualClock:
    """Time stands still until `advance`; sleepers are visible, so order can be tested exactly."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now_seconds = 0.0
        self._deadlines: dict[int, float] = {}

    def now_seconds(self) -> float:
        with self._changed:
            return self._now_seconds

    def sleep_until(self, deadline_seconds: float, stop: threading.Event) -> None:
        with self._changed:
            while self._now_seconds < deadline_seconds and not stop.is_set():
                self._deadlines[threading.get_ident()] = deadline_seconds
                self._changed.notify_all()
                # Short, because setting `stop` does not notify the condition.
                self._changed.wait(0.01)
            self._deadlines.pop(threading.get_ident(), None)
            self._changed.notify_all()

    def advance_to(self, seconds: float) -> None:
        with self._changed:
            assert seconds >= self._now_seconds
            self._now_seconds = seconds
            self._changed.notify_all()

    def await_sleepers(self, deadlines: list[float]) -> None:
        """Block until exactly these deadlines, all ahead of now, are being slept for."""

        def reached() -> bool:
            ahead = sorted(d for d in self._deadlines.values() if d > self._now_seconds)
            return len(ahead) == len(deadlines) and all(
                abs(a - b) < 1e-9 for a, b in zip(ahead, sorted(deadlines), strict=True)
            )

        with self._changed:
            assert self._changed.wait_for(reached, timeout=200), self._deadlines
