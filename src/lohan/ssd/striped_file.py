"""A logical file over all SSDs: extents, reads and writes of ranges, one ticket each.

Owns the files of one stripe set, the books of their extents and checksums, and reading an extent
back to compare it. Knows bytes only; what an extent means is known above. Called by the stores;
calls an `IoEngine`.
"""

import re
import threading
from collections.abc import Sequence

from lohan.errors import (
    CheckpointError,
    ConfigError,
    Corrupt,
    LohanError,
    ScheduleError,
    StorageError,
    bug,
)
from lohan.ssd.allocator import Extent, ExtentAllocator, unknown_extent
from lohan.ssd.checksums import ChecksumTable, Stretch, checksum_stretches, join_checksums
from lohan.ssd.engines.engine import (
    ALIGNMENT_BYTES,
    Access,
    DriveId,
    IoEngine,
    IoFile,
    Operation,
    Priority,
    refuse_unaligned,
)
from lohan.ssd.layout import CHUNK_BYTES, StripeLayout, damaged_fields
from lohan.ssd.runs.run_directory import RunDirectories
from lohan.ssd.stripe_files import (
    add_drives,
    close_files,
    find_files,
    make_files,
    refuse_files_out_of_place,
    refuse_wrong_count,
)
from lohan.ssd.striped_ticket import RangesInUse, StripedTicket

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class StripedFile:
    """Logical ranges over the directories of a run. Make one with `create` or `attach`.

    All methods: run on any thread. Only `verify` and `close` may block, and waiting for tickets.
    """

    def __init__(
        self,
        *,
        name: str,
        engine: IoEngine,
        files: Sequence[IoFile | None],
        layout: StripeLayout,
        allocator: ExtentAllocator,
        checksums: ChecksumTable,
        should_checksum: bool,
    ) -> None:
        self.name = name
        self.engine = engine
        self._files = tuple(files)
        self.paths = tuple(file.path if file is not None else "" for file in files)
        """The file of each drive; empty where a drive has no share."""
        self.layout = layout
        """Where logical bytes lie."""
        self.checksums = checksums
        """What is known about the bytes that were written."""
        self._allocator = allocator
        self._should_checksum = should_checksum
        self._lock = threading.Lock()
        self._in_use = RangesInUse(name)
        self._is_closed = False

    @classmethod
    def create(
        cls,
        run: RunDirectories,
        *,
        name: str,
        engine: IoEngine,
        capacity_bytes: int,
        weights: Sequence[float] | None = None,
        drives: Sequence[DriveId] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        should_checksum: bool = True,
    ) -> "StripedFile":
        """Reserve a new file of at least `capacity_bytes` over the directories of a run.

        Args:
            weights: measured rates of the directories; equal shares if not given.
            drives: what `add_drives` gave for this run; queues of its own if not given.

        Raises:
            OutOfSpace: the space is not there; nothing is left behind.
            StorageError: a file could not be made; nothing is left behind.
        """
        _refuse_bad_name(name)
        weights = [1.0] * len(run.paths) if weights is None else weights
        refuse_wrong_count("weights", weights, run.paths)
        layout = StripeLayout.plan(
            capacity_bytes=capacity_bytes, weights=weights, chunk_bytes=chunk_bytes
        )
        drives = add_drives(engine, run.paths) if drives is None else drives
        refuse_wrong_count("drives", drives, run.paths)
        return cls(
            name=name,
            engine=engine,
            files=make_files(engine, run, drives, name, layout),
            layout=layout,
            allocator=ExtentAllocator(layout.capacity_bytes),
            checksums=ChecksumTable(),
            should_checksum=should_checksum,
        )

    @classmethod
    def attach(
        cls,
        run: RunDirectories,
        *,
        name: str,
        layout: StripeLayout,
        extents: Sequence[Extent],
        checksums: Sequence[Stretch],
        engine: IoEngine,
        drives: Sequence[DriveId] | None = None,
        should_checksum: bool = True,
    ) -> "StripedFile":
        """Open the files of an earlier `create` again, with what was known of them then.

        Raises:
            CheckpointError: it lies on another number of directories, or extents make no sense.
            StorageError: a file is missing or too short.
        """
        if layout.num_drives != len(run.paths):
            raise CheckpointError(
                f"striped file {name!r} lies on {layout.num_drives} SSD directories, "
                f"{len(run.paths)} are given",
                why="every directory holds a part of every range",
                remedy="give the directories the run was made with, in any order",
            )
        try:
            allocator = ExtentAllocator(layout.capacity_bytes, taken=extents)
            _refuse_bad_name(name)
        except (ConfigError, ScheduleError) as error:
            raise damaged_fields("striped file", error) from None
        drives = add_drives(engine, run.paths) if drives is None else drives
        refuse_wrong_count("drives", drives, run.paths)
        return cls(
            name=name,
            engine=engine,
            files=find_files(engine, run.paths, drives, name, layout),
            layout=layout,
            allocator=allocator,
            checksums=ChecksumTable(checksums),
            should_checksum=should_checksum,
        )

    @property
    def accesses(self) -> tuple[Access, ...]:
        """How the files are open, to be shown to the user."""
        return tuple(file.access for file in self._files if file is not None)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """What is allocated, by offset."""
        with self._lock:
            return self._allocator.extents

    def allocate(self, nbytes: int) -> Extent:
        """Take an extent of at least `nbytes`.

        Raises:
            OutOfSpace: no free range is long enough.
        """
        with self._lock:
            self._refuse_if_closed()
            return self._allocator.allocate(nbytes)

    def free(self, extent: Extent) -> None:
        """Give an extent back for reuse; its requests must have been waited for."""
        with self._lock:
            self._refuse_if_closed()
            self._in_use.refuse_if_used("an extent was freed", extent.offset_bytes, extent.nbytes)
            self._allocator.free(extent)
            # Under the lock: the next owner of the range must find nothing of the last one.
            self.checksums.forget(extent.offset_bytes, extent.nbytes)

    def start_read(
        self,
        extent: Extent,
        *,
        address: int,
        nbytes: int,
        offset_bytes: int = 0,
        priority: Priority = Priority.PREFETCH,
        should_verify: bool = False,
        what: str = "",
    ) -> StripedTicket:
        """Read `nbytes` of an extent, from `offset_bytes` in it, into memory.

        May block: no. Owns until: the ticket was waited for, the memory belongs to the engine.
        `what` begins the message of an error.

        Raises:
            StorageError: the range is unaligned, or is to be verified and has no checksum.
        """
        ticket = self._enter(Operation.READ, extent, offset_bytes, address, nbytes, what)
        if should_verify:
            ticket.expected = self.checksums.inside(ticket.offset_bytes, nbytes)
            if sum(stretch.nbytes for stretch in ticket.expected) != nbytes:
                self.leave(ticket)
                raise self._unverifiable(ticket.offset_bytes, nbytes)
        self._start_parts(ticket, priority)
        return ticket

    def start_write(
        self,
        extent: Extent,
        *,
        address: int,
        nbytes: int,
        offset_bytes: int = 0,
        priority: Priority = Priority.WRITE_BACK,
        what: str = "",
    ) -> StripedTicket:
        """Write `nbytes` of memory to an extent, from `offset_bytes` in it.

        May block: no (the checksum takes as long as reading the memory once). Owns until: the
        ticket was waited for, the memory belongs to the engine and must not change.
        """
        ticket = self._enter(Operation.WRITE, extent, offset_bytes, address, nbytes, what)
        self.checksums.forget(ticket.offset_bytes, nbytes)
        self._start_parts(ticket, priority)
        if self._should_checksum:
            # Computed while the drives are already writing.
            ticket.written.extend(
                checksum_stretches(ticket.offset_bytes, address, nbytes, self.layout.chunk_bytes)
            )
        return ticket

    def start_flush(self) -> StripedTicket:
        """Make all writes started before durable, on every drive. May block: no.

        Raises:
            StorageError: a file was removed or replaced; what was written there is lost.
        """
        self._refuse_if_closed()
        refuse_files_out_of_place(self.engine, self._files)
        ticket = StripedTicket(
            file=self, operation=Operation.FLUSH, offset_bytes=0, asked_bytes=0, address=0
        )
        with self._lock:
            self._refuse_if_closed()
            self._in_use.enter(ticket)
        self._start_parts(ticket, Priority.WRITE_BACK)
        return ticket

    def verify(self, extent: Extent, *, address: int, nbytes: int) -> None:
        """Read an extent through `nbytes` of memory and compare it with what was written.

        Afterwards parts of it can be verified on their own, even if one checksum was kept for all.

        Runs on: any thread. May block: yes. Owns until: it ends, the memory is in use. Its two
        halves take turns, so that drives read while a checksum is computed.

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
        expected = self.checksums.inside(extent.offset_bytes, extent.nbytes)
        if sum(stretch.nbytes for stretch in expected) != extent.nbytes:
            raise self._unverifiable(extent.offset_bytes, extent.nbytes)
        comparison = _Comparison(self, expected)
        in_flight: list[tuple[int, StripedTicket]] = []

        def start(begin: int) -> None:
            ticket = self.start_read(
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
                ticket.wait()
                del in_flight[0]
                comparison.feed(ticket.offset_bytes, ticket.address, ticket.asked_bytes)
        finally:
            for _, ticket in in_flight:
                ticket.settle()

    def close(self, *, should_delete: bool = False) -> None:
        """Finish what was started, close the files; delete them if asked.

        Only files this object made or took over are deleted, and only if they are still the same.
        A second call does nothing.

        Raises:
            StorageError: a file could not be deleted, or a write that nobody waited for had failed
                (which does not matter where files are deleted); all files are closed all the same.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            unsettled = self._in_use.take_started()
        errors: list[LohanError] = []
        for ticket in unsettled:
            # Nobody waits for it any more: the memory it was read to may be gone.
            ticket.expected = ()
            try:
                error = ticket.settle()
            except ScheduleError as failed:  # the engine is of another process
                errors.append(failed)
                continue
            if error is not None and ticket.operation is not Operation.READ and not should_delete:
                errors.append(error)
        errors += close_files(self.engine, self._files, should_delete=should_delete)
        if errors:
            raise errors[0]

    def _enter(
        self,
        operation: Operation,
        extent: Extent,
        offset_bytes: int,
        address: int,
        nbytes: int,
        what: str,
    ) -> StripedTicket:
        """Check a request and take its range; nobody else can use the range from here on."""
        if offset_bytes < 0 or nbytes <= 0 or offset_bytes + nbytes > extent.nbytes:
            raise bug(
                f"{nbytes} bytes at {offset_bytes} of {extent} were asked for, which are not "
                "inside its extent"
            )
        # Checked for the whole range, so that no part of a bad request is ever started.
        refuse_unaligned(operation, self.name, extent.offset_bytes + offset_bytes, address, nbytes)
        ticket = StripedTicket(
            file=self,
            operation=operation,
            offset_bytes=extent.offset_bytes + offset_bytes,
            asked_bytes=nbytes,
            address=address,
            what=what,
        )
        with self._lock:
            self._refuse_if_closed()
            if not self._allocator.holds(extent):
                raise unknown_extent(extent)
            self._in_use.enter(ticket)
        return ticket

    def leave(self, ticket: StripedTicket) -> None:
        """A ticket's request is over: others may use its range. Called by the ticket."""
        with self._lock:
            self._in_use.leave(ticket)

    def corrupt(self, stretch: Stretch, found: int) -> Corrupt:
        """The error for bytes that are not those that were written."""
        piece = next(self.layout.pieces(stretch.offset_bytes, stretch.nbytes))
        return Corrupt(
            f"{stretch.nbytes} bytes read back have checksum {found:#010x}, written were "
            f"{stretch.checksum:#010x}",
            why="the drive, or something else that wrote to the file, changed them; training on "
            "would spread the damage",
            remedy="check the drive's health (smartctl) and resume from an older checkpoint",
            path=self.paths[piece.drive],
            offset_bytes=piece.offset_bytes,
            asked_bytes=stretch.nbytes,
        )

    def _unverifiable(self, offset_bytes: int, nbytes: int) -> StorageError:
        return StorageError(
            f"{nbytes} bytes at logical offset {offset_bytes} cannot be verified",
            why="part of the range was never written, or was written in other pieces, or without "
            "checksums",
            remedy="verify whole extents after they were wholly written",
            path=self.paths[0],
            asked_bytes=nbytes,
        )

    def _start_parts(self, ticket: StripedTicket, priority: Priority) -> None:
        engine = self.engine
        try:
            if ticket.operation is Operation.FLUSH:
                for file in self._files:
                    if file is not None:
                        ticket.parts.append(engine.start_flush(file))
            else:
                is_read = ticket.operation is Operation.READ
                start = engine.start_read if is_read else engine.start_write
                for piece in self.layout.pieces(ticket.offset_bytes, ticket.asked_bytes):
                    file = self._files[piece.drive]
                    assert file is not None
                    address = ticket.address + piece.start_bytes
                    ticket.parts.append(
                        start(file, piece.offset_bytes, address, piece.nbytes, priority)
                    )
        except BaseException:
            # The caller gets no ticket, so the memory must be free again when this is seen.
            ticket.settle()
            raise
        with self._lock:
            self._in_use.mark_started(ticket)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise bug(f"striped file {self.name!r} was used after it was closed")


def _refuse_bad_name(name: str) -> None:
    if not _FILE_NAME.fullmatch(name):
        raise ConfigError(
            f"a striped file was given the name {name!r}",
            why="it becomes part of file names inside the run directories",
            remedy="use up to 64 letters, digits, dots, dashes and underscores, a letter or digit "
            "first",
        )


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
            raise self._file.corrupt(stretch, self._running)
        # A write since the first of these reads has its own checksums: they must not be lost.
        self._file.checksums.refine(stretch, tuple(self._parts))
        self._expected.pop()
        self._running = 0
        self._parts.clear()
