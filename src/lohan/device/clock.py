"""Time as the emulated device sees it, so that tests can drive it by hand.

Owns the seam and the real clock. Every wait of the emulated device for a time to come goes through
here; waits for another thread do not.
"""

import threading
import time
from typing import Protocol

_LONGEST_WAIT_SECONDS = 3600.0  # beyond some years, the system call refuses the number


class Clock(Protocol):
    """Something to read the time from and to sleep by."""

    def now_seconds(self) -> float:
        """Return seconds since some fixed moment; never goes back."""

    def sleep_until(self, deadline_seconds: float, stop: threading.Event) -> None:
        """Block until the deadline, or until `stop` is set. Safe from several threads at once."""


class RealClock:
    """The machine's clock."""

    def now_seconds(self) -> float:
        """Return the monotonic time."""
        return time.monotonic()

    def sleep_until(self, deadline_seconds: float, stop: threading.Event) -> None:
        """Block until the deadline, or until `stop` is set."""
        while (left_seconds := deadline_seconds - time.monotonic()) > 0:
            if stop.wait(min(left_seconds, _LONGEST_WAIT_SECONDS)):
                return
