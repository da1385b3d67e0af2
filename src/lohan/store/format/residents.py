"""Parts of blocks that live in RAM, and the RAM a store holds altogether.

Owns their buffers (exact size in whole pages, leased for the life of the store) and the scratch
memory of fills and verifications; both are counted against one budget before the first is leased.
Which parts are resident is decided by the plan. Used by `states` and `initial`.
"""

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

from lohan.errors import ConfigError, DoesNotFit, ScheduleError
from lohan.ssd import Buffer, BufferPool
from lohan.store.format.layout import Part, StateLayout
from lohan.units import KIB, MIB, format_bytes
from lohan.vocabulary import BlockId, TensorKind

SCRATCH_BYTES = 16 * MIB
MIN_SCRATCH_BYTES = 512 * KIB

ResidentParts = Mapping[BlockId, Collection[Part]]


def parts_of_kinds(
    layout: StateLayout, kinds: Sequence[Collection[TensorKind]]
) -> dict[BlockId, tuple[Part, ...]]:
    """The parts that kinds of tensors, given per block as plans do, stand for."""
    return {
        BlockId(number): tuple(part for part in block.parts if part.kind in wanted)
        for number, (block, wanted) in enumerate(zip(layout.blocks, kinds, strict=True))
    }


def resident_bytes(layout: StateLayout, resident_parts: ResidentParts) -> int:
    """RAM these parts take.

    Raises:
        ConfigError: a block does not have such a part.
    """
    nbytes = 0
    for number, parts in resident_parts.items():
        block = layout.block(number)
        for part in set(parts):
            if part not in block.parts:
                raise ConfigError(
                    f"{part} of block {number} ({block.name}) was to live in RAM",
                    why=f"the block has {', '.join(block.parts) or 'no parts'}",
                    remedy="name parts the block has",
                )
            nbytes += block.part_bytes(part)
    return nbytes


class Residents:
    """Buffers of resident parts. Closing gives all of them back.

    Raises:
        DoesNotFit: the budget, or the system's memory, is too small; nothing stays leased.
    """

    def __init__(
        self,
        layout: StateLayout,
        resident_parts: ResidentParts,
        *,
        ram_budget_bytes: int | None,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        if scratch_bytes < MIN_SCRATCH_BYTES:
            raise ConfigError(
                f"scratch memory of {scratch_bytes} bytes was asked for",
                why=f"a fill needs {format_bytes(MIN_SCRATCH_BYTES)}",
                remedy="give at least that",
            )
        own_bytes = resident_bytes(layout, resident_parts)
        needed_bytes = own_bytes + scratch_bytes
        if ram_budget_bytes is not None and needed_bytes > ram_budget_bytes:
            raise DoesNotFit(
                f"the state store needs {format_bytes(needed_bytes)} of RAM, "
                f"{format_bytes(ram_budget_bytes)} are allowed",
                why=f"resident parts take {format_bytes(own_bytes)}, scratch memory "
                f"{format_bytes(scratch_bytes)}",
                remedy="keep fewer parts in RAM or raise the budget",
            )
        self.scratch_bytes = scratch_bytes
        self._needed_bytes = needed_bytes
        self._pool = BufferPool("resident states")
        self._scratch_lock = threading.Lock()
        self._buffers: dict[tuple[BlockId, Part], Buffer] = {}
        try:
            for number in sorted(resident_parts):
                block = layout.block(number)
                for part in block.parts:
                    if part in resident_parts[number]:
                        nbytes = block.part_bytes(part)
                        self._buffers[number, part] = self._pool.allocate(nbytes)
        except BaseException:
            self.close()
            raise

    @property
    def peak_bytes(self) -> int:
        """Most RAM ever leased; never above the budget."""
        return self._pool.peak_bytes

    def find(self, block: BlockId, part: Part) -> Buffer | None:
        """The buffer of a part, or None if it is not resident."""
        return self._buffers.get((block, part))

    def all(self) -> Iterator[tuple[BlockId, Part, Buffer]]:
        """Every resident part."""
        for (block, part), buffer in self._buffers.items():
            yield block, part, buffer

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Buffer]:
        """Lease the scratch memory.

        Raises:
            ScheduleError: somebody else has it; a second one would break the budget.
        """
        if not self._scratch_lock.acquire(blocking=False):
            raise ScheduleError(
                "scratch memory of the state store was asked for while it is in use",
                why="fills, verifications and reading of masters take turns, or they would exceed "
                "the RAM budget",
                remedy="let one end (or close its iterator) before the next begins",
            )
        try:
            with self._pool.allocate(self.scratch_bytes) as buffer:
                assert self._pool.in_use_bytes <= self._needed_bytes
                yield buffer
        finally:
            self._scratch_lock.release()

    def close(self) -> None:
        """Give all memory back. Twice is fine."""
        for buffer in self._buffers.values():
            self._pool.take_back(buffer)
        self._buffers.clear()
        self._pool.close()
