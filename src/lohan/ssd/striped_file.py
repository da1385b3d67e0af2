"""A logical file over all SSDs: extents, reads and writes of ranges, one ticket each.

Owns the files of one stripe set and the books of their extents and checksums. Knows bytes only;
what an extent means is known above. Called by the stores; calls an `IoEngine`.
"""

import threading
from collections.abc import Sequence

from lohan.errors import LohanError, ScheduleError, StorageError, bug
from lohan.ssd.allocator import Extent, ExtentAllocator, unknown_extent
from lohan.ssd.checksums import ChecksumTable, checksum_stretches
from lohan.ssd.engines.engine import (
    Access,
    DriveId,
    IoEngine,
    IoFile,
    Operation,
    Priority,
    refuse_unaligned,
)
from lohan.ssd.layout import CHUNK_BYTES, StripeLayout
from lohan.ssd.runs.run_directory import RunDirectories
from lohan.ssd.stripe_files import (
    add_drives,
    close_files,
    find_files,
    make_files,
    refuse_files_out_of_place,
    refuse_wrong_count,
)
from lohan.ssd.striped_record import StripedRecord, refuse_bad_name
from lohan.ssd.striped_ticket import RangesInUse, StripedTicket, unverifiable


class StripedFile:
    """Logical ranges over the directories of a run. Make one with `create` or `attach`.

    All methods: run on any thread. Only `wait` and `close` may block.
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
        self._engine = engine
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
        refuse_bad_name(name)
        weights = [1.0] * len(run.paths) if weights is None else weights
        refuse_wrong_count("weights", weights, run.paths)
        layout = StripeLayout.plan(
            capacity_bytes=capacity_bytes, weights=weights, chunk_bytes=chunk_bytes
        )
        drives = add_drives(engine, run.paths) if drives is None else drives
        refuse_wrong_count("drives", drives, run.paths)
        files = make_files(engine, run, drives, name, layout)
        return cls(
            name=name,
            engine=engine,
            files=files,
            layout=layout,
            allocator=ExtentAllocator(layout.capacity_bytes),
            checksums=ChecksumTable(),
            should_checksum=should_checksum,
        )

    @classmethod
    def attach(
        cls,
        run: RunDirectories,
        record: StripedRecord,
        *,
        engine: IoEngine,
        drives: Sequence[DriveId] | None = None,
    ) -> "StripedFile":
        """Open the files of an earlier `create` again, from what `record` gave.

        Raises:
            CheckpointError: the record is of another number of directories.
            StorageError: a file is missing or too short.
        """
        name, layout = record.name, record.layout
        record.refuse_other_count(len(run.paths))
        drives = add_drives(engine, run.paths) if drives is None else drives
        refuse_wrong_count("drives", drives, run.paths)
        files = find_files(engine, run.paths, drives, name, layout)
        return cls(
            name=name,
            engine=engine,
            files=files,
            layout=layout,
            allocator=record.allocator(),
            checksums=ChecksumTable(record.checksums.stretches()),
            should_checksum=record.should_checksum,
        )

    def record(self) -> StripedRecord:
        """What `attach` needs."""
        with self._lock:
            return StripedRecord(
                name=self.name,
                should_checksum=self._should_checksum,
                layout=self.layout,
                extents=self._allocator.extents,
                checksums=ChecksumTable(self.checksums.stretches()),
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

    @property
    def free_bytes(self) -> int:
        """Reserved bytes in no extent."""
        with self._lock:
            return self._allocator.free_bytes

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
    ) -> StripedTicket:
        """Read `nbytes` of an extent, from `offset_bytes` in it, into memory.

        May block: no. Owns until: the ticket was waited for, the memory belongs to the engine.

        Raises:
            StorageError: the range is unaligned, or is to be verified and has no checksum.
        """
        ticket = self._enter(Operation.READ, extent, offset_bytes, address, nbytes)
        if should_verify:
            ticket.expected = self.checksums.inside(ticket.offset_bytes, nbytes)
            if sum(stretch.nbytes for stretch in ticket.expected) != nbytes:
                self._leave(ticket)
                raise unverifiable(self.paths[0], ticket.offset_bytes, nbytes)
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
    ) -> StripedTicket:
        """Write `nbytes` of memory to an extent, from `offset_bytes` in it.

        May block: no (the checksum takes as long as reading the memory once). Owns until: the
        ticket was waited for, the memory belongs to the engine and must not change.
        """
        ticket = self._enter(Operation.WRITE, extent, offset_bytes, address, nbytes)
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
        refuse_files_out_of_place(self._engine, self._files)
        ticket = StripedTicket(operation=Operation.FLUSH, offset_bytes=0, asked_bytes=0, address=0)
        with self._lock:
            self._refuse_if_closed()
            self._in_use.enter(ticket)
        self._start_parts(ticket, Priority.WRITE_BACK)
        return ticket

    def is_done(self, ticket: StripedTicket) -> bool:
        """Whether `wait` would not block on a drive. May block: no."""
        return ticket.is_done(self._engine)

    def wait(self, ticket: StripedTicket) -> None:
        """Wait for all parts of a request; the memory is the caller's again when this ends.

        Raises:
            StorageError: one part failed; all parts are over.
            Corrupt: what was read is not what was written.
        """
        error = self.settle(ticket)
        if error is not None:
            raise error

    def settle(self, ticket: StripedTicket) -> StorageError | None:
        """As `wait`, but gives the error back: for cleaning up after another one."""
        try:
            return ticket.settle(self._engine, self.checksums, self.layout, self.paths)
        finally:
            self._leave(ticket)

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
                error = ticket.settle(self._engine, self.checksums, self.layout, self.paths)
            except ScheduleError as failed:  # the engine is of another process
                errors.append(failed)
                continue
            if error is not None and ticket.operation is not Operation.READ and not should_delete:
                errors.append(error)
        errors += close_files(self._engine, self._files, should_delete=should_delete)
        if errors:
            raise errors[0]

    def _enter(
        self, operation: Operation, extent: Extent, offset_bytes: int, address: int, nbytes: int
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
            operation=operation,
            offset_bytes=extent.offset_bytes + offset_bytes,
            asked_bytes=nbytes,
            address=address,
        )
        with self._lock:
            self._refuse_if_closed()
            if not self._allocator.holds(extent):
                raise unknown_extent(extent)
            self._in_use.enter(ticket)
        return ticket

    def _leave(self, ticket: StripedTicket) -> None:
        with self._lock:
            self._in_use.leave(ticket)

    def _start_parts(self, ticket: StripedTicket, priority: Priority) -> None:
        engine = self._engine
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
            self.settle(ticket)
            raise
        with self._lock:
            self._in_use.mark_started(ticket)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise bug(f"striped file {self.name!r} was used after it was closed")
