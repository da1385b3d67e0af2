"""One ticket for a range that lies on several drives.

Owns the joining of their outcomes: done when all parts are done, good when all are good, and the
checksums settled exactly once. Made by `striped_file`; opaque to its callers.
"""

import threading
from dataclasses import dataclass, field

from lohan.errors import Corrupt, StorageError
from lohan.ssd.checksums import ChecksumTable, Stretch, checksum_memory
from lohan.ssd.engines.engine import IoEngine, Operation, Ticket
from lohan.ssd.layout import StripeLayout


@dataclass(slots=True, kw_only=True, eq=False)
class StripedTicket:
    """The promise of one request to a striped file. See note "what a ticket promises"."""

    operation: Operation
    offset_bytes: int
    """In the logical space."""
    asked_bytes: int
    address: int
    parts: list[Ticket] = field(default_factory=list)
    written: list[Stretch] = field(default_factory=list)
    """Checksums to enter once the write is good."""
    expected: tuple[Stretch, ...] = ()
    """Checksums what was read must have."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_settled: bool = False
    _error: StorageError | None = None

    def is_done(self, engine: IoEngine) -> bool:
        """Whether settling would not block on a drive."""
        return self._is_settled or all(engine.is_done(part) for part in self.parts)

    def settle(
        self,
        engine: IoEngine,
        checksums: ChecksumTable,
        layout: StripeLayout,
        paths: tuple[str, ...],
    ) -> StorageError | None:
        """Wait for every part, then do once what follows from it. Returns the first error.

        Runs on: any thread. May block: yes, on the drives. All parts are waited for even when one
        failed: until then the memory is not the caller's. So an interrupt is raised when they are
        over; a second one at once, for a drive may never answer.
        """
        error, interrupt = self._await_parts(engine)
        error = self._settle_once(error, checksums, layout, paths)
        if interrupt is not None:
            raise interrupt
        return error

    def _await_parts(
        self, engine: IoEngine
    ) -> tuple[StorageError | None, KeyboardInterrupt | None]:
        error, interrupt = None, None
        for part in self.parts:
            try:
                try:
                    engine.wait(part)
                except KeyboardInterrupt as raised:
                    if interrupt is not None:
                        raise
                    interrupt = raised
                    engine.wait(part)
            except StorageError as failed:
                error = error or failed
        return error, interrupt

    def _settle_once(
        self,
        error: StorageError | None,
        checksums: ChecksumTable,
        layout: StripeLayout,
        paths: tuple[str, ...],
    ) -> StorageError | None:
        with self._lock:
            if not self._is_settled:
                if error is None:
                    error = self._find_corruption(layout, paths)
                if error is None:
                    for stretch in self.written:
                        checksums.record(stretch)
                self._error = error
                self._is_settled = True
            return self._error

    def _find_corruption(self, layout: StripeLayout, paths: tuple[str, ...]) -> Corrupt | None:
        for stretch in self.expected:
            start = self.address + stretch.offset_bytes - self.offset_bytes
            found = checksum_memory(start, stretch.nbytes)
            if found != stretch.checksum:
                return corrupt(stretch, found, layout, paths)
        return None


def corrupt(stretch: Stretch, found: int, layout: StripeLayout, paths: tuple[str, ...]) -> Corrupt:
    """The error for bytes that are not those that were written."""
    piece = next(layout.pieces(stretch.offset_bytes, stretch.nbytes))
    return Corrupt(
        f"{stretch.nbytes} bytes read back have checksum {found:#010x}, written were "
        f"{stretch.checksum:#010x}",
        why="the drive, or something else that wrote to the file, changed them; training on would "
        "spread the damage",
        remedy="check the drive's health (smartctl) and resume from an older checkpoint",
        path=paths[piece.drive],
        offset_bytes=piece.offset_bytes,
        asked_bytes=stretch.nbytes,
    )


def unverifiable(path: str, offset_bytes: int, nbytes: int) -> StorageError:
    """The error for a range whose checksums do not cover it."""
    return StorageError(
        f"{nbytes} bytes at logical offset {offset_bytes} cannot be verified",
        why="part of the range was never written, or was written in other pieces, or without "
        "checksums",
        remedy="verify whole extents after they were wholly written",
        path=path,
        asked_bytes=nbytes,
    )
