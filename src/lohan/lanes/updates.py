"""Updates piece by piece: states come in, AdamW runs on the CPU, states go out.

Owns the memory of states in flight and the order begin, write, finish that the state store asks
for. When each piece runs is the schedule's; with what numbers is in the StepRecord. Called by the
read, cpu and write lanes.
"""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lohan.errors import bug
from lohan.lanes.gradient_moves import GradientMoves
from lohan.lanes.memory import LeaseBook
from lohan.lanes.step_record import KernelCall, StepRecord
from lohan.lanes.weight_map import position_cuts
from lohan.lanes.weight_moves import WeightMoves, over
from lohan.optimizer import PlainState, SplitState, convert, update_states
from lohan.schedule.task import Lease, Task
from lohan.ssd import Buffer, Priority
from lohan.store import Part, StateStore, StoreTicket, wait_for
from lohan.vocabulary import BlockId, PoolName


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """The states of one piece in one buffer."""

    buffer: Buffer
    offsets: dict[Part, int] = field(default_factory=dict)
    gradient_offset: int | None = None


class Updates:
    """Actions of OS32 and update tasks."""

    def __init__(
        self,
        *,
        store: StateStore,
        book: LeaseBook,
        weights: WeightMoves,
        gradients: GradientMoves,
        num_pieces: Mapping[BlockId, int],
        num_threads: int,
    ) -> None:
        self._store, self._book = store, book
        self._weights, self._gradients = weights, gradients
        self._num_pieces, self._num_threads = num_pieces, num_threads
        self._in_flight: dict[tuple[BlockId, int, int], _InFlight] = {}
        """By block, step and number of the piece."""
        self._fresh: dict[tuple[BlockId, int], Buffer] = {}
        self._num_left: dict[tuple[BlockId, int], int] = {}
        self._num_begun: dict[tuple[BlockId, int], int] = {}
        self._lock = threading.Lock()

    # SSD -> RAM --------------------------------------------------------------------------------

    def read(self, task: Task) -> None:
        """States of a piece. Runs on: the read lane."""
        block, step, number = task.block, task.step, task.piece.number
        begin, end = self._range(block, number)
        if begin == end:
            return
        flight = self._open(task.leases[0], block, step, number)
        tickets: list[StoreTicket] = []
        spilled: list[StoreTicket] = []
        try:
            for part in flight.offsets:
                if part is Part.P16 and not self._reads_weights(block, step):
                    continue
                tickets.append(
                    self._store.start_read(
                        block,
                        part,
                        begin,
                        end,
                        flight.buffer,
                        offset_bytes=flight.offsets[part],
                        priority=Priority.PREFETCH,
                    )
                )
            if flight.gradient_offset is not None:
                spilled.append(
                    self._gradients.start_read(
                        block, step, number, flight.buffer, flight.gradient_offset
                    )
                )
        finally:
            try:
                wait_for(tickets)
            finally:
                self._gradients.finish_reads(spilled)

    def _open(self, lease: Lease, block: BlockId, step: int, number: int) -> _InFlight:
        """Lay the parts of a piece out in one buffer."""
        begin, end = self._range(block, number)
        offsets, total = {}, 0
        for part, where in self._store.layout.block(block).chunk(begin, end).items():
            if not self._store.is_resident(block, part):
                offsets[part] = total
                total += where.nbytes
        spilled = self._gradients.spilled_bytes(block, step, number)
        flight = _InFlight(
            buffer=self._book.ram_buffer(lease, total + spilled),
            offsets=offsets,
            gradient_offset=total if spilled else None,
        )
        self._in_flight[block, step, number] = flight
        return flight

    def _reads_weights(self, block: BlockId, step: int) -> bool:
        is_split = Part.LO16 in self._store.layout.block(block).trainable_parts
        return is_split and self._weights.take_held(block, step) is None

    # The arithmetic ----------------------------------------------------------------------------

    def compute(self, task: Task, record: StepRecord) -> None:
        """Update a piece. Runs on: the cpu lane."""
        block, step, number = task.block, task.step, task.piece.number
        begin, end = self._range(block, number)
        count = self._num_pieces[block]
        self._refuse_disorder(task, number, count)
        if not self._store.layout.block(block).num_trainable:
            self._gradients.forget(block, step)
            return  # nothing of the block is in this rank's slice
        if number == 0:
            with self._lock:
                self._num_left[block, step] = count
            self._store.begin_update(block)
            if not record.is_skipped:
                record.updated.add(block)
        fresh_lease = next((one for one in task.leases if one.pool is PoolName.FRESH), None)
        if fresh_lease is not None:
            nbytes = self._store.layout.block(block).part_bytes(Part.P16)
            fresh = self._book.ram_buffer(fresh_lease, nbytes)
            self._fresh[block, step] = fresh
            self._weights.put_fresh(block, fresh_lease, fresh)
        if begin < end:
            slot = next((one for one in task.leases if one.pool is PoolName.STATES), None)
            if slot is not None:
                self._open(slot, block, step, number)
            self._update(block, step, number, record)
        if number == count - 1:
            self._weights.forget_held(block, step)
            self._gradients.forget(block, step)
            self._fresh.pop((block, step), None)
        if not self._is_written(block):
            self._end_piece(block, step)

    def _refuse_disorder(self, task: Task, number: int, count: int) -> None:
        """The first piece takes what all need and the last gives it back."""
        key = (task.block, task.step)
        if number != self._num_begun.get(key, 0):
            raise bug(
                f"piece {number + 1} of {count} of the update of block {task.block} in step "
                f"{task.step} came out of turn"
            )
        self._num_begun[key] = number + 1
        if number == count - 1:
            del self._num_begun[key]

    def _update(self, block: BlockId, step: int, number: int, record: StepRecord) -> None:
        begin, end = self._range(block, number)
        flight = self._in_flight.get((block, step, number))
        parts = self._store.layout.block(block).trainable_parts
        arrays = {part: self._array(block, part, begin, end, flight) for part in parts}
        held = self._weights.take_held(block, step)
        if held is not None and flight is not None and Part.P16 in flight.offsets:
            buffer, at = held
            ctypes.memmove(
                arrays[Part.P16].data_ptr(), buffer.address + at + 2 * begin, 2 * (end - begin)
            )
        exists = self._gradients.exists(block, step)
        calls = record.calls(block, begin, end) if exists and not record.is_skipped else []
        covered = sum(one.end - one.begin for _, _, ranges in calls for one in ranges)
        if Part.P32 in arrays and covered < end - begin:
            # P16 is written from the masters; where nothing is updated it must be made too.
            convert(arrays[Part.P32], arrays[Part.P16], num_threads=self._num_threads)
        if calls:
            self._step(block, step, number, record, arrays, calls, flight)
        fresh = self._fresh.get((block, step))
        if fresh is not None:
            ctypes.memmove(
                fresh.address + 2 * begin, arrays[Part.P16].data_ptr(), 2 * (end - begin)
            )
        for part in parts:
            resident = self._store.resident_buffer(block, part)
            if resident is not None:
                where = self._store.layout.block(block).byte_range(part, begin, end)
                self._store.start_write(
                    block, part, begin, end, resident, offset_bytes=where.offset_bytes
                )

    def _step(
        self,
        block: BlockId,
        step: int,
        number: int,
        record: StepRecord,
        arrays: Mapping[Part, torch.Tensor],
        calls: Sequence[KernelCall],
        flight: _InFlight | None,
    ) -> None:
        begin, end = self._range(block, number)
        grad = self._gradients.values(block, step, begin, end)
        if grad is None:
            assert flight is not None
            assert flight.gradient_offset is not None
            grad = self._gradients.read_back(flight.buffer, flight.gradient_offset, end - begin)
        # The same state for every call: groups differ in rates and step, not in where they live.
        moments = {"m32": arrays[Part.M32], "v32": arrays[Part.V32]}
        state = (
            SplitState(p16=arrays[Part.P16], lo16=arrays[Part.LO16], **moments)
            if Part.LO16 in arrays
            else PlainState(p32=arrays[Part.P32], p16=arrays[Part.P16], **moments)
        )
        for settings, count, ranges in calls:
            update_states(
                grad,
                state,
                settings=settings,
                step=count,
                grad_scale=record.grad_scale,
                ranges=ranges,
                num_threads=self._num_threads,
            )

    def _array(
        self, block: BlockId, part: Part, begin: int, end: int, flight: _InFlight | None
    ) -> torch.Tensor:
        width = part.bytes_per_parameter
        resident = self._store.resident_buffer(block, part)
        if resident is not None:
            memory, at = resident, begin * width
        else:
            assert flight is not None
            memory, at = flight.buffer, flight.offsets[part]
        return over(memory, (end - begin) * width, at).view(self._store.dtype_of(part))

    # RAM -> SSD --------------------------------------------------------------------------------

    def write(self, task: Task) -> None:
        """States of a piece go out. Runs on: the write lane."""
        block, step, number = task.block, task.step, task.piece.number
        begin, end = self._range(block, number)
        if not self._is_written(block):
            return
        flight = self._in_flight.pop((block, step, number), None)
        tickets: list[StoreTicket] = []
        try:
            for part, offset_bytes in flight.offsets.items() if flight is not None else ():
                assert flight is not None
                tickets.append(
                    self._store.start_write(
                        block, part, begin, end, flight.buffer, offset_bytes=offset_bytes
                    )
                )
        finally:
            wait_for(tickets)
        self._end_piece(block, step)

    def _end_piece(self, block: BlockId, step: int) -> None:
        with self._lock:
            self._num_left[block, step] -= 1
            is_last = not self._num_left[block, step]
            if is_last:
                del self._num_left[block, step]
        if is_last:
            self._store.finish_update(block)

    def clear(self) -> None:
        """Forget everything: after a failure."""
        self._in_flight.clear()
        self._fresh.clear()
        self._num_left.clear()
        self._num_begun.clear()

    def _is_written(self, block: BlockId) -> bool:
        """Whether a write task follows the computation of each piece."""
        parts = self._store.layout.block(block).trainable_parts
        return any(not self._store.is_resident(block, part) for part in parts)

    def _range(self, block: BlockId, number: int) -> tuple[int, int]:
        cuts = position_cuts(self._store.layout.block(block).num_trainable, self._num_pieces[block])
        return cuts[number], cuts[number + 1]
