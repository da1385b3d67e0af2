"""A16 on its way: operator outputs leave while their block computes, and come back ahead of need.

Owns where each stored output of the step is: kept on the device, in an area of RAM (one per block
and tier, filled in the order outputs are made), on SSD, or back on the device. Implements the
`ActivationStore` of `drive.activations` for the main thread and the A16 actions for lanes.
"""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lohan.device.device import Device, Event
from lohan.device.memory import DeviceMemory
from lohan.drive.activations.store import ENTRY_ORDINAL, SIDE_ORDINAL, ActivationKey
from lohan.errors import bug
from lohan.lanes.memory import LeaseBook
from lohan.lanes.weight_map import DEVICE_ALIGNMENT_BYTES
from lohan.lanes.weight_moves import RamSpan, over
from lohan.plan.plan import Plan
from lohan.schedule.task import Lease, Task
from lohan.ssd import Buffer
from lohan.store import SwapFile, SwapKey
from lohan.vocabulary import BlockId, Choice, Lane, PoolName

_POOL_OF = {Choice.SWAP_TO_RAM: PoolName.SWAPPED, Choice.SWAP_TO_SSD: PoolName.SPILLING}
AREA_POOLS = tuple(_POOL_OF.values())
"""Pools of RAM that outputs leave to."""


@dataclass(slots=True, kw_only=True)
class _Area:
    """Outputs of one block that go to one tier."""

    buffer: Buffer | None
    lease: Lease
    num_bytes: int
    used_bytes: int = 0
    stretches: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Bytes of each micro-batch."""
    events: list[Event] = field(default_factory=list)
    is_on_ssd: bool = False


@dataclass(slots=True, kw_only=True)
class _Place:
    """One output in an area."""

    area: _Area
    offset_bytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True, kw_only=True)
class _Back:
    """The outputs of one micro-batch of an area, back where compute can read them."""

    memory: DeviceMemory | None
    flat: torch.Tensor
    num_left: int
    typed: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    """`flat`, as numbers of each type asked for."""

    def tensor(self, place: _Place, at_bytes: int) -> torch.Tensor:
        """One output, from so many bytes on."""
        whole = self.typed.get(place.dtype)
        if whole is None:
            whole = self.flat[: self.flat.numel() // 16 * 16].view(place.dtype)
            self.typed[place.dtype] = whole
        begin = int(whole.storage_offset()) + at_bytes // place.dtype.itemsize
        return whole.as_strided(place.size, place.stride, begin)


class SwappedActivations:
    """Stored outputs of the step under way. `put`, `get`, `drop`: the main thread; others: lanes.

    A lane and the main thread never have the same area at a time: the schedule's order sees to it.
    """

    def __init__(self, *, device: Device, book: LeaseBook, file: SwapFile | None) -> None:
        self._device, self._book, self._file = device, book, file
        self._choices: Mapping[BlockId, Mapping[int, Choice]] = {}
        self._step = 0
        self._moving_bytes = 0
        self._limit_bytes = 0
        self._kept: dict[ActivationKey, torch.Tensor] = {}
        self._places: dict[ActivationKey, _Place] = {}
        self._areas: dict[tuple[BlockId, PoolName], _Area] = {}
        self._back: dict[tuple[BlockId, PoolName, int], _Back] = {}
        self._spare: dict[tuple[BlockId, PoolName], DeviceMemory] = {}
        """Where the next micro-batch of an area comes back to."""
        self._moving: deque[tuple[Event, int]] = deque()
        self._shared: set[tuple[BlockId, int, int]] = set()
        """Entries that other blocks asked for: from now on they are kept."""
        self._lock = threading.Lock()
        self.num_misfits = 0
        """Outputs that found no place in their area and were kept instead."""

    def __len__(self) -> int:
        return len(self._kept) + len(self._places)

    def begin(self, plan: Plan, step: int, moving_bytes: int) -> None:
        """A step begins, with the choices of a plan; `moving_bytes` may be on their way out."""
        self._choices = {
            BlockId(number): {ENTRY_ORDINAL: block.input_choice, **dict(block.choices)}
            for number, block in enumerate(plan.blocks)
        }
        self._step, self._limit_bytes = step, moving_bytes

    def open_area(self, block: BlockId, lease: Lease, slack_bytes: int) -> None:
        """Take the RAM of a block's outputs for one tier, before it runs. Runs on: main."""
        if self._device.shares_ram and lease.pool is PoolName.SWAPPED:
            return  # They are in RAM as they are made.
        num_bytes = lease.nbytes + slack_bytes
        self._areas[block, lease.pool] = _Area(
            buffer=self._book.ram_buffer(lease, num_bytes), lease=lease, num_bytes=num_bytes
        )

    # The main thread ---------------------------------------------------------------------------

    def put(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Take an output: keep it, or start its copy."""
        area = self._area_for(key)
        if area is None or not self._start_copy(key, tensor, area):
            self._kept[key] = tensor

    def _area_for(self, key: ActivationKey) -> _Area | None:
        if key.ordinal == SIDE_ORDINAL or (key.block, key.ordinal, key.output) in self._shared:
            return None
        choice = self._choices.get(key.block, {}).get(key.ordinal, Choice.KEEP)
        pool = _POOL_OF.get(choice)
        return None if pool is None else self._areas.get((key.block, pool))

    def _start_copy(self, key: ActivationKey, tensor: torch.Tensor, area: _Area) -> bool:
        nbytes = tensor.numel() * tensor.element_size()
        begin = -(-area.used_bytes // DEVICE_ALIGNMENT_BYTES) * DEVICE_ALIGNMENT_BYTES
        # Attention with a mask returns its seed in main memory: it stays there.
        is_here = tensor.device.type == self._device.torch_device.type
        is_dense = is_here and tensor.numel() > 0 and _is_dense(tensor)
        if not is_dense or begin + nbytes > area.num_bytes or area.buffer is None:
            self.num_misfits += is_dense
            return False
        while self._moving_bytes + nbytes > self._limit_bytes and self._moving:
            self._compute_after_oldest()
        span = RamSpan(area.buffer.address + begin, nbytes, area.buffer)
        event = self._device.copy_async(
            span, tensor, lane=Lane.GPU_TO_RAM, after=[self._device.record()]
        )
        self._moving.append((event, nbytes))
        self._moving_bytes += nbytes
        area.used_bytes = begin + nbytes
        first, _ = area.stretches.get(key.micro_batch, (begin, 0))
        area.stretches[key.micro_batch] = (first, area.used_bytes)
        area.events.append(event)
        self._places[key] = _Place(
            area=area,
            offset_bytes=begin,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            dtype=tensor.dtype,
        )
        return True

    def _compute_after_oldest(self) -> None:
        """Let compute have the memory of the oldest copy out again, once that is done. This thread
        goes on launching."""
        event, nbytes = self._moving.popleft()
        self._device.compute_waits(event)
        self._moving_bytes -= nbytes

    def get(self, key: ActivationKey) -> torch.Tensor:
        """An output, where compute can read it."""
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        place = self._places[key]
        pool = place.area.lease.pool
        back = self._back.get((key.block, pool, key.micro_batch))
        if back is None:
            back = self._bring_back(key.block, place.area, key.micro_batch)
        at = place.offset_bytes - place.area.stretches[key.micro_batch][0]
        return back.tensor(place, at)

    def share(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Keep what a later block needs too: it would be asked for before it came back."""
        self._shared.add((key.block, key.ordinal, key.output))
        if self._places.pop(key, None) is not None:
            self._kept[key] = tensor

    def drop(self, key: ActivationKey) -> None:
        """Forget an output."""
        if self._kept.pop(key, None) is not None:
            return
        place = self._places.pop(key)
        pool = place.area.lease.pool
        back = self._back.get((key.block, pool, key.micro_batch))
        if back is None:
            # It goes before it came back: its memory is about to change under the copy.
            while self._moving:
                self._compute_after_oldest()
            return
        back.num_left -= 1
        if not back.num_left:
            del self._back[key.block, pool, key.micro_batch]
            if back.memory is not None:
                del back.flat, back.typed
                self._keep_for_next(key.block, place.area, back.memory)

    def _keep_for_next(self, block: BlockId, area: _Area, memory: DeviceMemory) -> None:
        """The next micro-batch of the block comes back to the same place: compute that reads it may
        still be queued, and other memory is not planned for."""
        if self._device.queue is not None and any(p.area is area for p in self._places.values()):
            self._spare[block, area.lease.pool] = memory
        else:
            self._device.free(memory)

    def close_areas(self, block: BlockId) -> None:
        """A block has gone backward: its areas are used up. Runs on: main."""
        for pool in AREA_POOLS:
            self._areas.pop((block, pool), None)
            spare = self._spare.pop((block, pool), None)
            if spare is not None:
                self._device.free(spare)

    # Lanes -------------------------------------------------------------------------------------

    def copied_out(self, task: Task) -> None:
        """GPU -> RAM: wait for what `put` started. Runs on: the copy lane."""
        for pool in AREA_POOLS:
            area = self._areas.get((task.block, pool))
            for event in area.events if area is not None else ():
                self._device.wait(event)

    def write(self, task: Task) -> None:
        """RAM -> SSD. Runs on: the write lane."""
        area = self._areas.get((task.block, PoolName.SPILLING))
        if area is None:
            return
        assert area.buffer is not None
        if area.used_bytes:
            assert self._file is not None
            key = self._file_key(task.block)
            self._file.start_put(key, area.buffer, area.used_bytes).wait()
        area.is_on_ssd = True
        area.buffer = None

    def read(self, task: Task) -> None:
        """SSD -> RAM. Runs on: the read lane."""
        area = self._areas.get((task.block, PoolName.SPILLING))
        if area is None:
            return
        area.lease = task.leases[0]
        area.buffer = self._book.ram_buffer(area.lease, area.num_bytes)
        if area.used_bytes:
            assert self._file is not None
            key = self._file_key(task.block)
            self._file.start_get(key, area.buffer).wait()
            self._file.drop(key)

    def copy_back(self, task: Task, *, is_alone: bool) -> None:
        """RAM -> GPU: the first micro-batch; the others when it is done. Runs on: the copy lane."""
        for pool in AREA_POOLS:
            area = self._areas.get((task.block, pool))
            if area is None:
                continue
            # A micro-batch that has gone backward without the block (which handed its input
            # through) has left nothing to bring.
            if any(k.micro_batch == 0 and p.area is area for k, p in list(self._places.items())):
                self._bring_back(task.block, area, 0)
            if is_alone and self._device.shares_ram and area.buffer is not None:
                # Compute reads where it was read to; the RAM's lease ends here, the device's not.
                self._book.move(area.lease, task.leases[0])

    def _bring_back(self, block: BlockId, area: _Area, micro_batch: int) -> _Back:
        begin, end = area.stretches[micro_batch]
        buffer = area.buffer
        assert buffer is not None, "an output is needed that is on SSD"
        if self._device.shares_ram:
            back = _Back(memory=None, flat=over(buffer, end - begin, begin), num_left=0)
        else:
            span = RamSpan(buffer.address + begin, end - begin, buffer)
            queue, spare = self._device.queue, self._spare.pop((block, area.lease.pool), None)
            if queue is not None and spare is not None and spare.nbytes == span.nbytes:
                memory = spare
                queue.copy_in(memory, span)
            else:
                if spare is not None:
                    self._device.free(spare)
                memory = self._device.alloc(end - begin)
                self._device.wait(self._device.copy_async(memory, span, lane=Lane.RAM_TO_GPU))
            back = _Back(memory=memory, flat=memory.bytes(), num_left=0)
        back.num_left = sum(
            key.micro_batch == micro_batch and place.area is area
            for key, place in list(self._places.items())
        )
        self._back[block, area.lease.pool, micro_batch] = back
        return back

    def _file_key(self, block: BlockId) -> SwapKey:
        return SwapKey(step=self._step, micro_batch=0, block=block, operator=0)

    def end(self) -> None:
        """The step is over.

        Raises:
            ScheduleError: something was left behind.
        """
        while self._moving:
            self._compute_after_oldest()
        if len(self) or self._back or self._areas:
            raise bug(
                f"{len(self)} activations and {len(self._areas)} areas were left after a step"
            )

    def clear(self) -> None:
        """Forget everything: after a failure."""
        self._moving.clear()
        self._moving_bytes = 0
        for memory in (*self._spare.values(), *(back.memory for back in self._back.values())):
            if memory is not None:
                self._device.free(memory)
        self._spare.clear()
        self._kept.clear()
        self._places.clear()
        self._areas.clear()
        self._back.clear()


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
