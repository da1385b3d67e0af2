"""Reading a whole extent back and comparing it with its checksums.

Owns the reading ahead and the joining of checksums across reads. Called on resume, and when a user
asks whether a checkpoint is whole.
"""

from lohan.errors import ConfigError
from lohan.ssd.allocator import Extent
from lohan.ssd.checksums import Stretch, checksum_stretches, join_checksums
from lohan.ssd.engines.engine import ALIGNMENT_BYTES, Priority
from lohan.ssd.striped_file import StripedFile
from lohan.ssd.striped_ticket import StripedTicket, corrupt, unverifiable


def verify_extent(file: StripedFile, extent: Extent, *, address: int, nbytes: int) -> None:
    """Read an extent through `nbytes` of memory and compare it with what was written.

    Afterwards parts of it can be verified on their own, even if one checksum was kept for all.

    Runs on: any thread. May block: yes. Owns until: it ends, the memory is in use. Its two halves
    take turns, so that drives read while a checksum is computed.

    Raises:
        Corrupt: it is not what was written.
        StorageError: it was never wholly written, or cannot be read.
    """
    half = nbytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if half == 0:
        raise ConfigError(
            f"{nbytes} bytes of memory are given to verify an extent",
            why="two pages are the least",
            remedy=f"give at least {2 * ALIGNMENT_BYTES} bytes",
        )
    expected = file.checksums.inside(extent.offset_bytes, extent.nbytes)
    if sum(stretch.nbytes for stretch in expected) != extent.nbytes:
        raise unverifiable(file.paths[0], extent.offset_bytes, extent.nbytes)
    comparison = _Comparison(file, expected)
    in_flight: list[tuple[int, StripedTicket]] = []

    def start(begin: int) -> None:
        ticket = file.start_read(
            extent,
            address=address + begin // half % 2 * half,
            nbytes=min(half, extent.nbytes - begin),
            offset_bytes=begin,
            priority=Priority.BACKGROUND,
        )
        in_flight.append((begin, ticket))

    try:
        start(0)
        while in_flight:
            begin, ticket = in_flight[0]
            if begin + half < extent.nbytes:
                start(begin + half)
            file.wait(ticket)
            del in_flight[0]
            comparison.feed(ticket.offset_bytes, ticket.address, ticket.asked_bytes)
    finally:
        for _, ticket in in_flight:
            file.settle(ticket)


class _Comparison:
    """Compares bytes that come in order with the stretches they make up."""

    def __init__(self, file: StripedFile, expected: tuple[Stretch, ...]) -> None:
        self._file = file
        self._expected = list(reversed(expected))
        self._running = 0
        self._parts: list[Stretch] = []

    def feed(self, offset_bytes: int, address: int, nbytes: int) -> None:
        """Take the next bytes; the lock of the interpreter is not held over them."""
        chunk_bytes = self._file.layout.chunk_bytes
        end = offset_bytes + nbytes
        while offset_bytes < end:
            stretch = self._expected[-1]
            count = min(stretch.end_bytes, end) - offset_bytes
            for part in checksum_stretches(offset_bytes, address, count, chunk_bytes):
                self._running = join_checksums(self._running, part.checksum, part.nbytes)
                self._parts.append(part)
            offset_bytes += count
            address += count
            if offset_bytes == stretch.end_bytes:
                self._end_stretch(stretch)

    def _end_stretch(self, stretch: Stretch) -> None:
        if self._running != stretch.checksum:
            raise corrupt(stretch, self._running, self._file.layout, self._file.paths)
        # A write since the first of these reads has its own checksums: they must not be lost.
        self._file.checksums.refine(stretch, tuple(self._parts))
        self._expected.pop()
        self._running = 0
        self._parts.clear()
