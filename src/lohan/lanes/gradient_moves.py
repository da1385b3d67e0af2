"""G16 on its way: one flat copy per block leaves the GPU, is squared for the norm, and waits.

Owns the gradients of the steps under way, in RAM or spilled to SSD in the pieces their updates
read. Where a device computes from main memory, the buffer is handed over. Called by lanes; the main
thread leases the buffer a backward pass fills.

Of several reduction groups a buffer holds one gradient each. They leave together, go slice by slice
to the ranks that own them, and are added up there (`reduce`): what waits then is an fp32 sum.
"""

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lohan.device.device import Device
from lohan.device.memory import DeviceMemory
from lohan.drive import SegmentGradients
from lohan.lanes.memory import LeaseBook
from lohan.lanes.step_record import NonFinitePolicy, StepRecord, nonfinite_error
from lohan.lanes.weight_map import position_cuts
from lohan.lanes.weight_moves import RamSpan, over
from lohan.optimizer import LEAF_ELEMENTS, num_leaves, sum_of_squares
from lohan.parallel.exchange import gather_squares, places_of_groups, sent_bytes, share_missing
from lohan.parallel.folding import fold
from lohan.parallel.peers import Peers
from lohan.plan.workload import Workload
from lohan.schedule.task import Lease, Task
from lohan.ssd import Buffer, Priority, whole_pages
from lohan.store import StateLayout, StoreTicket, SwapFile, SwapKey, wait_for
from lohan.vocabulary import BlockId, Lane

_SPILLED = -1
"""Stands in for the micro-batch in the key of a spilled gradient."""


@dataclass(slots=True, kw_only=True)
class _Gradient:
    """One block's gradient in one step."""

    on_device: DeviceMemory | None = None
    in_ram: Buffer | None = None
    source: Lease | None = None
    """What the buffer of the backward pass is leased as."""
    is_complete: bool = False
    is_spilled: bool = False
    missing: Sequence[frozenset[str] | None] = ()
    """Of each group, the rank's own or all: names without a gradient; None: it has none at all."""
    group_bytes: int = 0
    """From one group to the next in the buffer."""


class GradientMoves:
    """Actions of G16 tasks. A gradient belongs to one lane at a time, by the schedule's order."""

    def __init__(
        self,
        *,
        layout: StateLayout,
        whole: StateLayout,
        peers: Peers,
        workload: Workload,
        book: LeaseBook,
        device: Device,
        spill: SwapFile | None,
        names: Mapping[BlockId, str],
        num_pieces: Mapping[BlockId, int],
        num_threads: int,
        dtype: torch.dtype,
    ) -> None:
        """`layout`: of what this rank updates, of the `whole` model."""
        self._layout, self._book, self._device, self._spill = layout, book, device, spill
        self._whole, self._peers, self._workload = whole, peers, workload
        self._folds, self._width = workload.reduction_groups > 1, workload.gradient_bytes
        self._names, self._num_pieces = names, num_pieces
        self._num_threads, self._dtype = num_threads, dtype
        self._gradients: dict[tuple[BlockId, int], _Gradient] = {}
        self._lock = threading.Lock()

    def buffer(self, block: BlockId, step: int, lease: Lease, num_bytes: int) -> torch.Tensor:
        """Memory for a block's gradient while it is made. Runs on: the main thread."""
        gradient = self._of(block, step)
        gradient.source = lease
        num_groups = self._workload.groups_per_rank
        least_bytes = sent_bytes(self._whole.block(block), self._peers.num_ranks)
        gradient.group_bytes = max(num_bytes // num_groups, least_bytes)
        num_bytes = num_groups * gradient.group_bytes
        if self._device.shares_ram:
            gradient.in_ram = self._book.ram_buffer(lease, num_bytes)
            return over(gradient.in_ram, num_bytes)
        gradient.on_device = self._book.device_memory(lease, num_bytes)
        return gradient.on_device.bytes()

    def complete(self, record: StepRecord, step: int, gradients: SegmentGradients) -> None:
        """A block has gone backward. Runs on: the main thread."""
        block = gradients.segment
        gradient = self._of(block, step)
        gradient.is_complete, gradient.missing = True, gradients.missing_by_group
        if not self._folds:
            self._begin_sums(block, record, gradients.missing)

    def _begin_sums(self, block: BlockId, record: StepRecord, missing: frozenset[str]) -> None:
        record.missing[block] = missing
        record.leaf_sums[block] = np.zeros(num_leaves(self._layout.block(block).num_trainable))

    def leave(self, task: Task, record: StepRecord) -> None:
        """GPU -> RAM, wholly or in pieces; the squares are summed on the way. Runs on: the copy
        lane.

        Raises:
            NonFiniteGradients: some are infinite or NaN, the policy is to stop, and no norm task
                will look at them.
        """
        gradient = self._of(task.block, task.step)
        if not gradient.is_complete:
            return  # The block had no backward pass, or trains nothing.
        if self._folds:
            self._leave_groups(gradient, task)
            return
        count_positions = self._layout.block(task.block).num_trainable
        number, count = task.piece
        if gradient.on_device is not None and gradient.in_ram is None:
            waiting = task.leases[0]
            gradient.in_ram = self._book.ram_buffer(waiting, 2 * count_positions)
        elif self._device.shares_ram and number == 0:
            assert gradient.source is not None
            self._book.move(gradient.source, task.leases[0])
        assert gradient.in_ram is not None
        cuts = position_cuts(count_positions, count)
        begin, end = cuts[number], cuts[number + 1]
        if begin == end:
            return
        if gradient.on_device is not None:
            span = RamSpan(gradient.in_ram.address + 2 * begin, 2 * (end - begin), gradient.in_ram)
            source = gradient.on_device.bytes()[2 * begin : 2 * end]
            self._device.wait(self._device.copy_async(span, source, lane=Lane.GPU_TO_RAM))
        self._add_squares(task.block, gradient.in_ram, begin, end, record)

    def _add_squares(
        self, block: BlockId, memory: Buffer, begin: int, end: int, record: StepRecord
    ) -> None:
        sums = np.zeros(num_leaves(end - begin))
        values = self._tensor(memory, begin, end)
        num_bad = sum_of_squares(values, sums, num_threads=self._num_threads)
        record.add_sums(block, sums, begin // LEAF_ELEMENTS, num_bad)
        if num_bad and not record.waits_for_norm and record.policy is NonFinitePolicy.STOP:
            raise nonfinite_error(record.number, {block: record.num_nonfinite[block]}, self._names)

    # Reduction groups --------------------------------------------------------------------------

    def _leave_groups(self, gradient: _Gradient, task: Task) -> None:
        if gradient.on_device is None:
            assert gradient.source is not None
            self._book.move(gradient.source, task.leases[0])
            return
        source = gradient.on_device.bytes()
        gradient.in_ram = self._book.ram_buffer(task.leases[0], source.nbytes)
        span = RamSpan(gradient.in_ram.address, source.nbytes, gradient.in_ram)
        self._device.wait(self._device.copy_async(span, source, lane=Lane.GPU_TO_RAM))

    def exchange(self, task: Task) -> None:
        """Slices of all groups go to their owners. Runs on: the peer lane."""
        block, gradient = self._whole.block(task.block), self._of(task.block, task.step)
        if not block.num_trainable:
            return
        nbytes = sent_bytes(block, self._peers.num_ranks)
        num_groups, what = self._workload.groups_per_rank, task.name
        own = gradient.missing if gradient.is_complete else (None,) * num_groups
        gradient.missing = share_missing(self._peers, block, own, what=what)
        gradient.is_complete = any(names is not None for names in gradient.missing)
        if not gradient.is_complete:
            return
        sent = gradient.in_ram
        if sent is None:  # this rank had no backward pass of the block
            sent = self._book.ram_buffer(task.returns[0], num_groups * nbytes)
            over(sent, num_groups * nbytes).zero_()
            gradient.group_bytes = nbytes
        arrived = self._book.ram_buffer(task.leases[0], num_groups * nbytes)
        for number in range(num_groups):
            self._peers.exchange(
                over(arrived, nbytes, number * nbytes),
                over(sent, nbytes, number * gradient.group_bytes),
                what=what,
            )
        gradient.in_ram, gradient.group_bytes = arrived, nbytes

    def gather_squares(self, record: StepRecord) -> None:
        """The sums of squares of whole blocks, of what every rank has of them. Runs on: the peer
        lane, where there is one."""
        if self._peers.num_ranks > 1:
            gather_squares(self._peers, self._whole, record.leaf_sums, record.num_nonfinite)

    def reduce(self, task: Task, record: StepRecord) -> None:
        """Add up this rank's slice of the gradients of all groups, and its squares. Runs on: the
        cpu lane. Raises as `leave` does."""
        gradient, block = self._of(task.block, task.step), self._layout.block(task.block)
        if not gradient.is_complete:
            return
        names = frozenset(e.name for e in self._whole.block(task.block).tensors if e.is_trainable)
        missing = [names if one is None else one for one in gradient.missing]
        self._begin_sums(task.block, record, frozenset.intersection(*missing))
        groups, count = gradient.in_ram, block.num_trainable
        assert groups is not None
        gradient.in_ram = self._book.ram_buffer(task.leases[0], self._width * count)
        if not count:
            return
        places = places_of_groups(
            self._peers.num_ranks, gradient.group_bytes, len(gradient.missing)
        )
        fold(
            self._tensor(gradient.in_ram, 0, count),
            [over(groups, 2 * count, place).view(self._dtype) for place in places],
            gradient.missing,
            block,
        )
        self._add_squares(task.block, gradient.in_ram, 0, count, record)

    def spill(self, task: Task) -> None:
        """RAM -> SSD, in the pieces that updates read. Runs on: the write lane."""
        gradient = self._of(task.block, task.step)
        if gradient.in_ram is None:
            return
        assert self._spill is not None
        tickets: list[StoreTicket] = []
        try:
            for number, (begin, end) in enumerate(self._pieces(task.block)):
                if begin < end:
                    tickets.append(
                        self._spill.start_put(
                            _key(task.block, task.step, number),
                            gradient.in_ram,
                            self._width * (end - begin),
                            offset_bytes=self._width * begin,
                        )
                    )
        finally:
            wait_for(tickets)
        gradient.in_ram, gradient.is_spilled = None, True

    # What updates use --------------------------------------------------------------------------

    def exists(self, block: BlockId, step: int) -> bool:
        """Whether a block has a gradient in a step at all."""
        gradient = self._gradients.get((block, step))
        return gradient is not None and gradient.is_complete

    def spilled_bytes(self, block: BlockId, step: int, number: int) -> int:
        """Bytes, in whole pages, of a piece that must be read back; 0 if it is in RAM."""
        gradient = self._gradients.get((block, step))
        if gradient is None or not gradient.is_spilled:
            return 0
        begin, end = self._pieces(block)[number]
        return whole_pages(self._width * (end - begin))

    def start_read(
        self, block: BlockId, step: int, number: int, memory: Buffer, offset_bytes: int
    ) -> StoreTicket:
        """Read a spilled piece back."""
        assert self._spill is not None
        return self._spill.start_get(
            _key(block, step, number),
            memory,
            offset_bytes=offset_bytes,
            priority=Priority.PREFETCH,
        )

    def finish_reads(self, tickets: list[StoreTicket]) -> None:
        """Wait for pieces, and give their places on SSD up."""
        if not tickets:
            return
        assert self._spill is not None
        wait_for(tickets)
        for ticket in tickets:
            assert isinstance(ticket.key, SwapKey)
            self._spill.drop(ticket.key)

    def values(self, block: BlockId, step: int, begin: int, end: int) -> torch.Tensor | None:
        """Positions [begin, end) of a gradient in RAM; None if it was spilled."""
        gradient = self._of(block, step)
        return None if gradient.in_ram is None else self._tensor(gradient.in_ram, begin, end)

    def read_back(self, memory: Buffer, offset_bytes: int, count: int) -> torch.Tensor:
        """So many values of a spilled piece that was read."""
        return self._values(over(memory, self._width * count, offset_bytes))

    def forget(self, block: BlockId, step: int) -> None:
        """The update of a block is done; the lease ends with its task."""
        with self._lock:
            self._gradients.pop((block, step), None)

    def clear(self) -> None:
        """Forget everything: after a failure."""
        with self._lock:
            self._gradients.clear()

    def _of(self, block: BlockId, step: int) -> _Gradient:
        with self._lock:
            return self._gradients.setdefault((block, step), _Gradient())

    def _pieces(self, block: BlockId) -> list[tuple[int, int]]:
        cuts = position_cuts(self._layout.block(block).num_trainable, self._num_pieces[block])
        return list(itertools.pairwise(cuts))

    def _tensor(self, buffer: Buffer, begin: int, end: int) -> torch.Tensor:
        return self._values(over(buffer, self._width * (end - begin), self._width * begin))

    def _values(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(torch.float32 if self._folds else self._dtype)


def _key(block: BlockId, step: int, number: int) -> SwapKey:
    return SwapKey(step=step, micro_batch=_SPILLED, block=block, operator=number)
