"""The striped file of a run's states: an extent per block, slot and part.

Owns the extents, their checksums as the manifest keeps them, and errors that name block and part.
Knows no slot rules: it reads and writes where it is told. Used by `states` and `initial`.
"""

from collections.abc import Iterator

from lohan.errors import StorageError
from lohan.ssd import Extent, Priority, StripedFile, StripedTicket
from lohan.store.files.tickets import Tally
from lohan.store.format.layout import ByteRange, Part, StateLayout
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
    """Reads and writes parts of blocks. Methods: any thread; only `flush` and `verify` block."""

    def __init__(self, layout: StateLayout, file: StripedFile, extents: dict[Home, Extent]) -> None:
        self.layout = layout
        self.extents = extents
        self.tally = Tally()
        self.file = file

    def start_read(
        self,
        home: Home,
        where: ByteRange,
        *,
        address: int,
        priority: Priority = Priority.PREFETCH,
        should_verify: bool = False,
        what: str = "",
    ) -> StripedTicket:
        """Read part of an extent, verified if asked and possible; `what` is named by its errors.

        A range that cuts through what one checksum covers cannot be, and is read as it is.
        """
        extent = self.extents[home]
        offset_bytes = extent.offset_bytes + where.offset_bytes
        is_verified = should_verify and self.file.checksums.covers(offset_bytes, where.nbytes)
        ticket = self.file.start_read(
            extent,
            address=address,
            nbytes=where.nbytes,
            offset_bytes=where.offset_bytes,
            priority=priority,
            should_verify=is_verified,
            what=what or self.describe(home),
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
        what: str = "",
    ) -> StripedTicket:
        """Write part of an extent; `what` is named by its errors."""
        ticket = self.file.start_write(
            self.extents[home],
            address=address,
            nbytes=where.nbytes,
            offset_bytes=where.offset_bytes,
            priority=priority,
            what=what or self.describe(home),
        )
        self.tally.add(written_bytes=where.nbytes)
        return ticket

    def flush(self) -> None:
        """Make everything written durable. May block: yes.

        Raises:
            StorageError: a drive failed, or a file was removed.
        """
        self.file.start_flush().wait()

    def checksums_of(self, home: Home) -> tuple[int, ...] | None:
        """One checksum per piece of `checksum_pieces`; None if part of it was never written."""
        found = []
        for piece in checksum_pieces(self.extents[home], self.file.layout.chunk_bytes):
            checksum = self.file.checksums.joined(piece.offset_bytes, piece.nbytes)
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
            self.file.verify(self.extents[home], address=address, nbytes=nbytes)
        except StorageError as error:
            raise error.retold(what=f"{self.describe(home)}: {error.what}") from None
        read_bytes = self.extents[home].nbytes
        self.tally.add(read_bytes=read_bytes, verified_bytes=read_bytes)

    def describe(self, home: Home) -> str:
        """Block, part and slot in words."""
        block, slot, part = home
        name = self.layout.block(block).name
        return f"{part} of block {block} ({name})" + ("" if part.is_frozen else f" in slot {slot}")


def checksum_pieces(extent: Extent, chunk_bytes: int) -> Iterator[Extent]:
    """Cut an extent at multiples of the stripe's chunk: each piece lies on one drive."""
    position, end = extent.offset_bytes, extent.offset_bytes + extent.nbytes
    while position < end:
        after = min(end, (position // chunk_bytes + 1) * chunk_bytes)
        yield Extent(offset_bytes=position, nbytes=after - position)
        position = after
