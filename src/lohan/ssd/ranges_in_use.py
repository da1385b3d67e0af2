"""Which ranges of a striped file have a request that was not waited for.

Owns the rule that a range is used by one writer, or by readers, at a time. Pure: no files, no lock.
Used by `striped_file`, always under its lock, so that no two requests can slip in side by side.
"""

from lohan.errors import ScheduleError
from lohan.ssd.engines.engine import Operation
from lohan.ssd.striped_ticket import StripedTicket


class RangesInUse:
    """Tickets from the moment a request is accepted until it was settled."""

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
            raise ScheduleError(
                f"{event} over {nbytes} bytes at logical offset {offset_bytes} of "
                f"{self._name!r} while a {other.operation.name.lower()} there was not waited for",
                why="which bytes end up there would be a matter of luck",
                remedy="wait for every ticket before its range is used again; this is a "
                "mistake in lohan",
            )
