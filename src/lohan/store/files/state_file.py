"""The striped file of a run's states: an extent per block, slot and part.

Owns the extents, their checksums as the manifest keeps them, and errors that name block and part.
Knows no slot rules: it reads and writes where it is told. Used by `states` and `initial`.
"""

from collections.abc import Iterator, Sequence

from lohan.errors import StorageError
from lohan.ssd import (
    CHUNK_BYTES,
    ChecksumTable,
    DriveId,
    Extent,
    IoEngine,
    Priority,
    RunDirectories,
    Stretch,
    StripedFile,
    StripedTicket,
    StripeLayout,
    verify_extent,
)
from lohan.ssd.striped_record import StripedRecord
from lohan.store.files.counters import Tally
from lohan.store.files.rewording import named_error
from lohan.store.format.layout import ByteRange, StateLayout
from lohan.store.format.parts import Part
from lohan.store.format.slots import SlotCount
from lohan.vocabulary import BlockId

STATES_NAME = "states"

Home = tuple[BlockId, int, Part]
"""Block, slot and part of an extent. Frozen parts have slot 0 only."""


def home_of(block: BlockId, part: Part, slot: int) -> Home:
    """Where a part of a block is when the block is in a slot."""
    return block, 0 if part.is_frozen else slot, part


def homes(layout: StateLayout, slot_count: SlotCount) -> Iterator[tuple[Home, int]]:
    """Every extent a store has, with its bytes, in the order they are laid out."""
    for number, block in enumerate(layout.blocks):
        for slot in range(slot_count):
            for part in block.parts:
                if not part.is_frozen or slot == 0:
                    yield (BlockId(number), slot, part), block.part_bytes(part)


class StateFile:
    """Reads and writes parts of blocks. All methods: any thread; only `wait` and `verify` block."""

    def __init__(self, layout: StateLayout, file: StripedFile, extents: dict[Home, Extent]) -> None:
        self.layout = layout
        self.extents = extents
        self.tally = Tally()
        self._file = file

    @classmethod
    def create(
        cls,
        run: RunDirectories,
        layout: StateLayout,
        slot_count: SlotCount,
        *,
        engine: IoEngine,
        drives: Sequence[DriveId] | None,
        weights: Sequence[float] | None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> "StateFile":
        """Reserve all space there will ever be.

        Raises:
            OutOfSpace, StorageError: it is not there; nothing is left behind.
        """
        wanted = list(homes(layout, slot_count))
        file = StripedFile.create(
            run,
            name=STATES_NAME,
            engine=engine,
            capacity_bytes=sum(nbytes for _, nbytes in wanted),
            weights=weights,
            drives=drives,
            chunk_bytes=chunk_bytes,
        )
        return cls(layout, file, {home: file.allocate(nbytes) for home, nbytes in wanted})

    @classmethod
    def attach(
        cls,
        run: RunDirectories,
        layout: StateLayout,
        *,
        stripe: StripeLayout,
        extents: dict[Home, Extent],
        checksums: dict[Home, tuple[int, ...]],
        engine: IoEngine,
        drives: Sequence[DriveId] | None,
    ) -> "StateFile":
        """Open the file of an earlier run, with the checksums its manifest has.

        Raises:
            CheckpointError: the extents contradict each other.
            StorageError: a file is missing or too short.
        """
        # Kept apart, each lies on one drive, so that damage is found where it is.
        table = ChecksumTable(
            tuple(
                Stretch(offset_bytes=piece.offset_bytes, nbytes=piece.nbytes, checksum=checksum)
                for home, found in checksums.items()
                for piece, checksum in zip(
                    checksum_pieces(extents[home], stripe.chunk_bytes), found, strict=True
                )
            )
        )
        record = StripedRecord(
            name=STATES_NAME,
            should_checksum=True,
            layout=stripe,
            extents=tuple(sorted(extents.values())),
            checksums=table,
        )
        file = StripedFile.attach(run, record, engine=engine, drives=drives)
        return cls(layout, file, extents)

    @property
    def stripe(self) -> StripeLayout:
        """Where logical bytes lie."""
        return self._file.layout

    @property
    def paths(self) -> tuple[str, ...]:
        """The file of each drive."""
        return self._file.paths

    def start_read(
        self,
        home: Home,
        where: ByteRange,
        *,
        address: int,
        priority: Priority = Priority.PREFETCH,
        should_verify: bool = False,
    ) -> StripedTicket:
        """Read part of an extent, verified if asked and possible.

        A range that cuts through what one checksum covers cannot be, and is read as it is.
        """
        extent = self.extents[home]
        offset_bytes = extent.offset_bytes + where.offset_bytes
        is_verified = should_verify and self._file.checksums.covers(offset_bytes, where.nbytes)
        ticket = self._file.start_read(
            extent,
            address=address,
            nbytes=where.nbytes,
            offset_bytes=where.offset_bytes,
            priority=priority,
            should_verify=is_verified,
        )
        self.tally.add(read_bytes=where.nbytes, verified_bytes=where.nbytes if is_verified else 0)
        return ticket

    def start_write(
        self,
        home: Home,
        where: ByteRange,
        *,
        address: int,
        priority: Priority = Priority.WRITE_BACK,
    ) -> StripedTicket:
        """Write part of an extent."""
        ticket = self._file.start_write(
            self.extents[home],
            address=address,
            nbytes=where.nbytes,
            offset_bytes=where.offset_bytes,
            priority=priority,
        )
        self.tally.add(written_bytes=where.nbytes)
        return ticket

    def is_done(self, ticket: StripedTicket) -> bool:
        """Whether settling would not block."""
        return self._file.is_done(ticket)

    def settle(self, ticket: StripedTicket, what: str) -> StorageError | None:
        """Wait for a request; gives its error back, with `what` it was in the text."""
        error = self._file.settle(ticket)
        return named_error(error, what) if error is not None else None

    def flush(self) -> None:
        """Make everything written durable. May block: yes.

        Raises:
            StorageError: a drive failed, or a file was removed.
        """
        self._file.wait(self._file.start_flush())

    def checksums_of(self, home: Home) -> tuple[int, ...] | None:
        """One checksum per piece of `checksum_pieces`; None if part of it was never written."""
        found = []
        for piece in checksum_pieces(self.extents[home], self.stripe.chunk_bytes):
            checksum = self._file.checksums.joined(piece.offset_bytes, piece.nbytes)
            if checksum is None:
                return None
            found.append(checksum)
        return tuple(found)

    def verify(self, home: Home, *, address: int, nbytes: int) -> None:
        """Read an extent through `nbytes` of memory and compare it with its checksums.

        Raises:
            Corrupt: naming block, part, file and offset.
        """
        try:
            verify_extent(self._file, self.extents[home], address=address, nbytes=nbytes)
        except StorageError as error:
            raise named_error(error, self.describe(home)) from None
        read_bytes = self.extents[home].nbytes
        self.tally.add(read_bytes=read_bytes, verified_bytes=read_bytes)

    def describe(self, home: Home) -> str:
        """Block, part and slot in words."""
        block, slot, part = home
        name = self.layout.block(block).name
        return f"{part} of block {block} ({name})" + ("" if part.is_frozen else f" in slot {slot}")

    def close(self, *, should_delete: bool = False) -> None:
        """Finish what was started and close, or delete, the files. Twice is fine."""
        self._file.close(should_delete=should_delete)


def checksum_pieces(extent: Extent, chunk_bytes: int) -> Iterator[Extent]:
    """Cut an extent at multiples of the stripe's chunk: each piece lies on one drive."""
    position, end = extent.offset_bytes, extent.offset_bytes + extent.nbytes
    while position < end:
        after = min(end, (position // chunk_bytes + 1) * chunk_bytes)
        yield Extent(offset_bytes=position, nbytes=after - position)
        position = after
