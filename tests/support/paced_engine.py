"""Emulated drives: an engine whose requests take as long as drives of set rates would need.

Owns a link that works off bytes at a read and a write rate, and when each request is over on it.
The bytes themselves are moved by another engine underneath, as fast as it can; a request is done
when both are. For measurements of the engine on a machine that is not there. Made by benchmarks.

Note "One link". All drives of the engine together are one link, as `Machine` sees them: its rates
are those of all of them. Each direction works off its requests one by one, the most urgent first;
where reads and writes share the link (not duplex), each has it half of the time while both have
something to do. Nothing runs in the background: the link is brought up to date by whoever asks.
"""

import heapq
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lohan import _native
from lohan.errors import ConfigError, ScheduleError
from lohan.ssd.engines.engine import (
    DriveId,
    DriveSettings,
    IoEngine,
    IoFile,
    Operation,
    Priority,
    Ticket,
)

_LONGEST_NAP_SECONDS = 0.1
"""A request that comes later may be served first, so a waiter looks again after this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """How fast the drives are together."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    is_duplex: bool

    def __post_init__(self) -> None:
        for rate in (self.read_bytes_per_second, self.write_bytes_per_second):
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(
                    f"an emulated drive has a rate of {rate} bytes/s",
                    why="a rate must be above zero and finite",
                    remedy="give positive rates, or leave the engine out for real speed",
                )


@dataclass(slots=True, kw_only=True, eq=False)
class PacedTicket:
    """A request of the engine underneath, and what the link still has to do for it."""

    asked_bytes: int
    inner: Ticket
    left_seconds: float = 0.0
    is_served: bool = False


@dataclass(slots=True)
class _Direction:
    """Requests of one direction that the link has not worked off."""

    waiting: list[tuple[int, int, PacedTicket]] = field(default_factory=list)
    served: PacedTicket | None = None

    def next(self) -> PacedTicket | None:
        if self.served is None and self.waiting:
            self.served = heapq.heappop(self.waiting)[2]
        return self.served


class _Link:
    """When requests are over. Any thread may call any method."""

    def __init__(self, rates: LinkRates, now: Callable[[], float]) -> None:
        self._rates, self._now = rates, now
        self._lock = threading.Lock()
        self._at_seconds = now()
        self._directions = {Operation.READ: _Direction(), Operation.WRITE: _Direction()}
        self._num_entered = 0

    def enter(self, ticket: PacedTicket, operation: Operation, priority: Priority) -> None:
        """A request begins to wait for its turn."""
        rates = self._rates
        is_read = operation is Operation.READ
        rate = rates.read_bytes_per_second if is_read else rates.write_bytes_per_second
        ticket.left_seconds = ticket.asked_bytes / rate
        with self._lock:
            self._bring_up_to_date()
            entry = (int(priority), self._num_entered, ticket)
            heapq.heappush(self._directions[operation].waiting, entry)
            self._num_entered += 1

    def seconds_to_wait(self, ticket: PacedTicket) -> float:
        """How long a waiter may sleep before it looks again; 0 if the request is over."""
        with self._lock:
            self._bring_up_to_date()
            if ticket.is_served:
                return 0.0
            # Nothing is over before the next request is; it may be the one that is waited for.
            return self._until_next()[0]

    def _until_next(self) -> tuple[float, float]:
        """Seconds until a request is over if none comes, and the speed of each direction."""
        heads = [one for direction in self._directions.values() if (one := direction.next())]
        if not heads:
            return math.inf, 1.0
        speed = 0.5 if len(heads) == 2 and not self._rates.is_duplex else 1.0
        return min(head.left_seconds for head in heads) / speed, speed

    def _bring_up_to_date(self) -> None:
        now = self._now()
        while self._at_seconds < now:
            until, speed = self._until_next()
            step = min(until, now - self._at_seconds)
            is_over = until <= now - self._at_seconds
            for direction in self._directions.values():
                head = direction.next()
                if head is None:
                    continue
                head.left_seconds -= step * speed
                # Rounding must not leave a sliver of the request that the step was measured by.
                if is_over and head.left_seconds <= 1e-12:
                    head.is_served, direction.served = True, None
            self._at_seconds = self._at_seconds + step if is_over else now


class PacedEngine:
    """`IoEngine` over another one, no faster than its link."""

    def __init__(
        self,
        inner: IoEngine,
        rates: LinkRates,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`inner` belongs to this engine from here on. `now` and `sleep` are for tests."""
        self._inner, self.rates = inner, rates
        self._link = _Link(rates, now)
        self._sleep = sleep

    @property
    def name(self) -> str:
        """That of the engine underneath, and that it is held back."""
        return f"paced {self._inner.name}"

    def add_drive(self, settings: DriveSettings) -> DriveId:
        """Add a drive; all of them share the link."""
        return self._inner.add_drive(settings)

    def create_file(self, path: str, *, drive: DriveId) -> IoFile:
        """Make a file."""
        return self._inner.create_file(path, drive=drive)

    def open_file(self, path: str, *, drive: DriveId) -> IoFile:
        """Open a file."""
        return self._inner.open_file(path, drive=drive)

    def free_bytes(self, directory: str) -> int:
        """Space this user can still take there."""
        return self._inner.free_bytes(directory)

    def file_bytes(self, file: IoFile) -> int:
        """How long the file is now."""
        return self._inner.file_bytes(file)

    def resize(self, file: IoFile, nbytes: int) -> None:
        """Make the file `nbytes` long, at the speed of the engine underneath."""
        self._inner.resize(file, nbytes)

    def is_in_place(self, file: IoFile) -> bool:
        """Whether the file's path still leads to it."""
        return self._inner.is_in_place(file)

    def remove_file(self, file: IoFile) -> bool:
        """Delete the file if it is still in place."""
        return self._inner.remove_file(file)

    def close_file(self, file: IoFile) -> None:
        """Let go of the file."""
        self._inner.close_file(file)

    def start_read(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> PacedTicket:
        """Read into memory; it is there when the link would have brought it."""
        inner = self._inner.start_read(file, offset_bytes, address, nbytes, priority)
        return self._enter(inner, Operation.READ, priority)

    def start_write(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> PacedTicket:
        """Write from memory; done when the link would have taken it."""
        inner = self._inner.start_write(file, offset_bytes, address, nbytes, priority)
        return self._enter(inner, Operation.WRITE, priority)

    def start_flush(self, file: IoFile) -> PacedTicket:
        """Make what was written durable, at the speed of the engine underneath."""
        inner = self._inner.start_flush(file)
        return PacedTicket(asked_bytes=0, inner=inner, is_served=True)

    def is_done(self, ticket: Ticket) -> bool:
        """Whether `wait` would return or raise at once."""
        own = _own(ticket)
        return self._inner.is_done(own.inner) and not self._link.seconds_to_wait(own)

    def wait(self, ticket: Ticket) -> None:
        """Wait until the request is done. A failure is told at once.

        Raises:
            As the engine underneath.
        """
        own = _own(ticket)
        self._inner.wait(own.inner)
        while not own.is_served:
            seconds = self._link.seconds_to_wait(own)
            if seconds > 0:
                self._sleep(min(seconds, _LONGEST_NAP_SECONDS))

    def counters(self, drive: DriveId) -> _native.DriveCounters:
        """What this drive has done so far."""
        return self._inner.counters(drive)

    def close(self) -> None:
        """Close the engine underneath; requests that were started are still served."""
        self._inner.close()

    def _enter(self, inner: Ticket, operation: Operation, priority: Priority) -> PacedTicket:
        ticket = PacedTicket(asked_bytes=inner.asked_bytes, inner=inner)
        self._link.enter(ticket, operation, priority)
        return ticket


def _own(ticket: Ticket) -> PacedTicket:
    if isinstance(ticket, PacedTicket):
        return ticket
    raise ScheduleError(
        f"a paced engine was given a ticket of type {type(ticket).__name__}",
        why="files and tickets belong to the engine that made them",
        remedy="use the engine that gave it",
    )
