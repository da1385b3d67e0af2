"""SSD traffic of a store, counted where requests start.

Owns the numbers and their lock. Used by the stores; read by reports.
"""

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounters:
    """SSD traffic of a store since it was made. What stays in RAM causes none."""

    read_bytes: int = 0
    written_bytes: int = 0
    verified_bytes: int = 0
    """Of the bytes read, those compared with their checksums."""

    def since(self, before: "StoreCounters") -> "StoreCounters":
        """What was added after an earlier look at the same store."""
        return StoreCounters(
            read_bytes=self.read_bytes - before.read_bytes,
            written_bytes=self.written_bytes - before.written_bytes,
            verified_bytes=self.verified_bytes - before.verified_bytes,
        )


class Tally:
    """Adds up counters. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = StoreCounters()

    @property
    def counters(self) -> StoreCounters:
        """The sums so far."""
        with self._lock:
            return self._counters

    def add(self, *, read_bytes: int = 0, written_bytes: int = 0, verified_bytes: int = 0) -> None:
        """Count one request."""
        with self._lock:
            before = self._counters
            self._counters = StoreCounters(
                read_bytes=before.read_bytes + read_bytes,
                written_bytes=before.written_bytes + written_bytes,
                verified_bytes=before.verified_bytes + verified_bytes,
            )
