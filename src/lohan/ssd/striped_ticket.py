"""One ticket for a range that lies on several drives, and which ranges have one that is out.

Owns the joining of outcomes (done when all parts are done, good when all are good, the checksums
settled exactly once), and the rule that a range is used by one writer, or by readers, at a time.
Made by `striped_file`; opaque to its callers.
"""

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lohan.errors import Corrupt, StorageError, bug
from lohan.ssd.checksums import Stretch, checksum_memory
from lohan.ssd.engines.engine import Operation, Ticket

if TYPE_CHECKING:
    from lohan.ssd.striped_file import StripedFile


@dataclass(slots=True, kw_only=True, eq=False)
class StripedTicket:
    """The promise of one request to a striped file. See note "what a ticket promises"."""

    file: "StripedFile"
    operation: Operation
    offset_bytes: int
    """In the logical space."""
    asked_bytes: int
    address: int
    what: str = ""
    """What moves, for messages; whoever asked may know more of it than the file does."""
    parts: list[Ticket] = field(default_factory=list)
    written: list[Stretch] = field(default_factory=list)
    """Checksums to enter once the write is good."""
    expected: tuple[Stretch, ...] = ()
    """Checksums what was read must have."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_settled: bool = False
    _error: StorageError | None = None

    def is_done(self) -> bool:
        """Whether `wait` would not block on a drive. May block: no."""
        return self._is_settled or all(map(self.file.engine.is_done, self.parts))

    def wait(self) -> None:
        """Wait for all parts of the request; the memory is the caller's again when this ends.

        Raises:
            StorageError: one part failed; all parts are over.
            Corrupt: what was read is not what was written.
        """
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> StorageError | None:
        """As `wait`, but gives the error back: for cleaning up after another one.

        Runs on: any thread. May block: yes, on the drives. All parts are waited for even when one
        failed: until then the memory is not the caller's. So an interrupt is raised when they are
        over; a second one at once, for a drive may never answer.
        """
        try:
            error, interrupt = self._await_parts()
            error = self._settle_once(error)
        finally:
            self.file.leave(self)
        if interrupt is not None:
            raise interrupt
        return error

    def _await_parts(self) -> tuple[StorageError | None, KeyboardInterrupt | None]:
        error, interrupt = None, None
        for part in self.parts:
            try:
                try:
                    self.file.engine.wait(part)
                except KeyboardInterrupt as raised:
                    if interrupt is not None:
                        raise
                    interrupt = raised
                    self.file.engine.wait(part)
            except StorageError as failed:
                error = error or failed
        return error, interrupt

    def _settle_once(self, error: StorageError | None) -> StorageError | None:
        """Do once what follows from the end of all parts."""
        with self._lock:
            if not self._is_settled:
                error = error or self._find_corruption()
                if error is None:
                    for stretch in self.written:
                        self.file.checksums.record(stretch)
                if error is not None and self.what:
                    error = error.retold(what=f"{self.what}: {error.what}")
                self._error, self._is_settled = error, True
            return self._error

    def _find_corruption(self) -> Corrupt | None:
        for stretch in self.expected:
            start = self.address + stretch.offset_bytes - self.offset_bytes
            found = checksum_memory(start, stretch.nbytes)
            if found != stretch.checksum:
                return self.file.corrupt(stretch, found)
        return None


class RangesInUse:
    """Tickets from the moment a request is accepted until it was settled.

    Has no lock: used under that of `striped_file`, so that no two requests slip in side by side.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_started: dict[StripedTicket, bool] = {}

    def enter(self, ticket: StripedTicket) -> None:
        """Accept a request; its parts may be started once this has returned.

        Raises:
            ScheduleError: it would meet a request whose bytes, or checksums, mix with its own.
        """
        is_write = ticket.operation is Operation.WRITE
        event = f"a {ticket.operation.name.lower()} was started"
        for other in self._is_started:
            if is_write or other.operation is Operation.WRITE:
                self._refuse_overlap(other, event, ticket.offset_bytes, ticket.asked_bytes)
        self._is_started[ticket] = False

    def mark_started(self, ticket: StripedTicket) -> None:
        """All parts of a request are with the engine."""
        if ticket in self._is_started:
            self._is_started[ticket] = True

    def leave(self, ticket: StripedTicket) -> None:
        """A request is over. Twice is fine."""
        self._is_started.pop(ticket, None)

    def refuse_if_used(self, event: str, offset_bytes: int, nbytes: int) -> None:
        """Refuse what must not meet any request.

        Raises:
            ScheduleError: a request in this range was not waited for.
        """
        for other in self._is_started:
            self._refuse_overlap(other, event, offset_bytes, nbytes)

    def take_started(self) -> tuple[StripedTicket, ...]:
        """Forget the requests that are with the engine, and say which they were."""
        started = tuple(ticket for ticket, is_started in self._is_started.items() if is_started)
        for ticket in started:
            del self._is_started[ticket]
        return started

    def _refuse_overlap(
        self, other: StripedTicket, event: str, offset_bytes: int, nbytes: int
    ) -> None:
        end = other.offset_bytes + other.asked_bytes
        if other.offset_bytes < offset_bytes + nbytes and offset_bytes < end:
            raise bug(
                f"{event} over {nbytes} bytes at logical offset {offset_bytes} of "
                f"{self._name!r} while a {other.operation.name.lower()} there was not waited for"
            )
