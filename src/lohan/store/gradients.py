"""Gradients that wait: G16 of whole blocks in leased RAM, and on SSD when told to go there.

Owns the RAM slots, the SSD room for spilled blocks and where each block's gradient is. Which blocks
spill, and when, is the caller's. Nothing here survives the process. Called by the runtime's lanes.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lohan.errors import ScheduleError, StorageError
from lohan.ssd import (
    ALIGNMENT_BYTES,
    CHUNK_BYTES,
    Buffer,
    BufferPool,
    DriveId,
    Extent,
    IoEngine,
    Operation,
    Priority,
    RunDirectories,
    StripedFile,
)
from lohan.store.counters import StoreCounters, Tally
from lohan.store.layout import GRAIN
from lohan.store.rewording import named_error
from lohan.store.scratch_file import make_scratch_file
from lohan.store.tickets import RamBuffer, StoreTicket, checked_memory
from lohan.vocabulary import BlockId

GRADIENTS_NAME = "gradients"


@dataclass(slots=True)
class _Waiting:
    """One block's gradient: in a RAM slot, on SSD, or (while it spills) in both."""

    buffer: Buffer | None
    extent: Extent | None = None


class GradientStore:
    """Flat gradients by block, over the same positions as the block's trainable state.

    All methods: run on any thread; only `wait` and `close` may block.

        lease -> (gradient is copied in) -> start_read, any number of times -> drop
        lease -> start_spill, wait (the RAM slot is free again) -> start_read -> drop

    Args:
        num_positions: length of each block's gradient.
        num_ram_slots: blocks that can be in RAM together; a slot fits the largest.
        spill_bytes: SSD room, reserved now; 0 for none.

    Raises:
        OutOfSpace, DoesNotFit: there is no room; nothing is left behind.
    """

    def __init__(
        self,
        run: RunDirectories,
        num_positions: Mapping[BlockId, int],
        *,
        engine: IoEngine,
        num_ram_slots: int,
        spill_bytes: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        drives: Sequence[DriveId] | None = None,
        weights: Sequence[float] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.dtype = dtype
        self._num_positions = dict(num_positions)
        self._tally = Tally()
        self._lock = threading.Lock()
        self._waiting: dict[BlockId, _Waiting] = {}
        largest = max((self.gradient_bytes(block) for block in num_positions), default=0)
        self._pool = BufferPool(
            name="waiting gradients",
            slot_bytes=max(largest, ALIGNMENT_BYTES),
            num_slots=num_ram_slots,
        )
        self._file: StripedFile | None = None
        if spill_bytes:
            try:
                self._file = make_scratch_file(
                    run,
                    GRADIENTS_NAME,
                    engine=engine,
                    drives=drives,
                    weights=weights,
                    capacity_bytes=spill_bytes,
                    chunk_bytes=chunk_bytes,
                )
            except BaseException:
                self._pool.close()
                raise

    @property
    def ram_held_bytes(self) -> int:
        """RAM of the slots, leased or not."""
        return self._pool.reserved_bytes

    @property
    def ram_regions(self) -> tuple[tuple[int, int], ...]:
        """Address and bytes of the memory of the slots: what to pin."""
        return self._pool.regions

    @property
    def counters(self) -> StoreCounters:
        """SSD traffic so far."""
        return self._tally.counters

    def gradient_bytes(self, block: BlockId) -> int:
        """Bytes of a block's gradient, in whole pages."""
        nbytes = self._num_positions[block] * self.dtype.itemsize
        return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def lease(self, block: BlockId) -> Buffer:
        """A RAM slot to copy a block's gradient into; it stays there until spilled or dropped.

        Raises:
            ScheduleError: no slot is free, or the block's gradient waits already.
        """
        with self._lock:
            if block in self._waiting:
                raise self._refusal(block, "came", "the one before was not dropped")
            buffer = self._pool.lease(self.gradient_bytes(block))
            self._waiting[block] = _Waiting(buffer)
            return buffer

    def start_spill(
        self, block: BlockId, *, priority: Priority = Priority.WRITE_BACK
    ) -> StoreTicket:
        """Write a gradient to SSD; once the ticket was waited for, its RAM slot is free.

        Raises:
            OutOfSpace: the reserved room is used up.
            ScheduleError: the gradient is not in RAM, or is on its way out.
        """
        nbytes = self.gradient_bytes(block)
        with self._lock:
            waiting = self._find(block)
            if waiting.buffer is None or waiting.extent is not None or self._file is None:
                raise self._refusal(block, "was to be spilled", "it has left RAM, or has no room")
            waiting.extent = self._file.allocate(nbytes)
            buffer, extent, file = waiting.buffer, waiting.extent, self._file
        try:
            striped = file.start_write(
                extent, address=buffer.address, nbytes=nbytes, priority=priority
            )
        except BaseException:
            with self._lock:
                file.free(extent)
                waiting.extent = None
            raise
        self._tally.add(written_bytes=nbytes)
        return StoreTicket(
            what=f"the gradient of block {block}",
            operation=Operation.WRITE,
            memory=buffer,
            offset_bytes=0,
            nbytes=nbytes,
            num_elements=self._num_positions[block],
            dtype=self.dtype,
            key=block,
            striped=striped,
        )

    def start_read(
        self,
        block: BlockId,
        begin: int,
        end: int,
        memory: RamBuffer | None = None,
        *,
        offset_bytes: int = 0,
        priority: Priority = Priority.PREFETCH,
    ) -> StoreTicket:
        """Positions [begin, end) of a gradient: in place if in RAM, else read into the memory.

        Owns until: the ticket was waited for, the memory's pages are the store's.
        """
        length = self._num_positions[block]
        if not 0 <= begin < end <= length or begin % GRAIN or (end % GRAIN and end != length):
            raise self._refusal(
                block, f"was read at [{begin}, {end})", f"ranges are multiples of {GRAIN}"
            )
        first_bytes = begin * self.dtype.itemsize
        nbytes = -(-end * self.dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES - first_bytes
        with self._lock:
            waiting = self._find(block)
        striped = None
        if waiting.buffer is not None:
            memory, offset_bytes = waiting.buffer, first_bytes
        else:
            assert self._file is not None
            assert waiting.extent is not None
            what = f"the gradient of block {block}"
            memory = checked_memory(what, memory, offset_bytes, nbytes)
            at = waiting.extent.offset_bytes + first_bytes
            is_verified = self._file.checksums.covers(at, nbytes)
            striped = self._file.start_read(
                waiting.extent,
                address=memory.address + offset_bytes,
                nbytes=nbytes,
                offset_bytes=first_bytes,
                priority=priority,
                should_verify=is_verified,
            )
            self._tally.add(read_bytes=nbytes, verified_bytes=nbytes if is_verified else 0)
        return StoreTicket(
            what=f"positions [{begin}, {end}) of the gradient of block {block}",
            operation=Operation.READ,
            memory=memory,
            offset_bytes=offset_bytes,
            nbytes=nbytes,
            num_elements=end - begin,
            dtype=self.dtype,
            key=block,
            striped=striped,
        )

    def is_done(self, ticket: StoreTicket) -> bool:
        """Whether `wait` would not block. May block: no."""
        if ticket.striped is None or self._file is None:
            return True
        return self._file.is_done(ticket.striped)

    def wait(self, ticket: StoreTicket) -> None:
        """Wait for a request. Twice is fine.

        Raises:
            StorageError: it failed. After a failed spill the gradient is still in RAM.
        """
        error = self.settle(ticket)
        if error is not None:
            raise error

    def settle(self, ticket: StoreTicket) -> StorageError | None:
        """As `wait`, but gives the error back."""
        if ticket.striped is None or self._file is None:
            return None
        error = self._file.settle(ticket.striped)
        if ticket.operation is Operation.WRITE:
            with self._lock:
                self._end_spill(ticket, error is None)
        return named_error(error, ticket.what) if error is not None else None

    def drop(self, block: BlockId) -> None:
        """Forget a gradient; its requests must have been waited for. May block: no."""
        with self._lock:
            waiting = self._find(block)
            if waiting.extent is not None and self._file is not None:
                self._file.free(waiting.extent)
            if waiting.buffer is not None:
                self._pool.take_back(waiting.buffer)
            del self._waiting[block]

    def close(self) -> None:
        """Finish what was started, delete the file, give the RAM back. Twice is fine."""
        if self._file is not None:
            self._file.close(should_delete=True)
        with self._lock:
            for waiting in self._waiting.values():
                if waiting.buffer is not None:
                    self._pool.take_back(waiting.buffer)
            self._waiting.clear()
        self._pool.close()

    def _end_spill(self, ticket: StoreTicket, is_good: bool) -> None:
        for waiting in self._waiting.values():
            if waiting.buffer is None or waiting.buffer is not ticket.memory:
                continue
            if is_good:
                self._pool.take_back(waiting.buffer)
                waiting.buffer = None
            elif waiting.extent is not None and self._file is not None:
                self._file.free(waiting.extent)
                waiting.extent = None

    def _find(self, block: BlockId) -> _Waiting:
        if block not in self._waiting:
            raise self._refusal(block, "was asked for", "none waits")
        return self._waiting[block]

    def _refusal(self, block: BlockId, event: str, why: str) -> ScheduleError:
        return ScheduleError(
            f"the gradient of block {block} {event}",
            why=why,
            remedy="lease, spill, read and drop a gradient in this order; this is a mistake in "
            "lohan",
        )
