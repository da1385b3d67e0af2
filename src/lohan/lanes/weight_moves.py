"""P16 on its way: SSD -> RAM -> GPU, in place for a segment's work, and gone again.

Owns the buffers of weights in flight, by fetch (block, pass, step). Where a device computes from
main memory, the buffer that was read is handed over and nothing is copied. When each move runs is
the schedule's; weights that wait in RAM straight from their update are put here by `updates`. Among
ranks each reads its slice, and `gather` makes the whole of the slices of all.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from lohan.device.device import Device
from lohan.device.memory import DeviceMemory
from lohan.drive.weights.parameter_views import ParameterSet
from lohan.errors import bug
from lohan.lanes.memory import LeaseBook
from lohan.lanes.weight_map import SegmentWeights, WeightPiece, position_cuts
from lohan.parallel.exchange import GatheredWeights, WeightRange
from lohan.parallel.peers import Peers
from lohan.schedule.task import Lease, Task
from lohan.ssd import Buffer, Priority
from lohan.store import Part, StateLayout, StateStore, StoreTicket, wait_for
from lohan.vocabulary import BlockId, Lane, Pass, PoolName


class Fetch(NamedTuple):
    """Why P16 of a block is brought."""

    block: BlockId
    of_pass: Pass
    step: int


@dataclass(slots=True)
class RamSpan:
    """Some bytes of main memory, as an end of a copy."""

    address: int
    nbytes: int
    owner: object


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """The weights of one fetch."""

    read: Buffer | None = None
    """What came from SSD."""
    offsets: dict[WeightPiece, int] = field(default_factory=dict)
    """Where in it each piece lies."""
    on_device: DeviceMemory | None = None
    in_place: torch.Tensor | None = None
    """Main memory the device computes from."""


def fetch_of(task: Task) -> Fetch:
    """Which fetch a P16 task belongs to."""
    assert task.of_pass is not None
    return Fetch(task.block, task.of_pass, task.step)


class WeightMoves:
    """Actions of P16 tasks, and binding. Lane threads move, the main thread binds."""

    def __init__(
        self,
        *,
        store: StateStore,
        weights: Mapping[BlockId, SegmentWeights],
        sets: Mapping[BlockId, ParameterSet],
        book: LeaseBook,
        device: Device,
        peers: Peers,
        whole: StateLayout,
    ) -> None:
        """`weights` say where they lie in the `whole` model; the store has this rank's slice."""
        self._store, self._weights, self._sets = store, weights, sets
        self._book, self._device, self._peers = book, device, peers
        self._gathered: dict[BlockId, GatheredWeights] = {}
        self._scratch: Buffer | None = None
        if peers.num_ranks > 1:
            self._gathered = {
                block: GatheredWeights(_ranges(own.pieces), whole, peers.num_ranks)
                for block, own in weights.items()
                if own.pieces
            }
            self._scratch = book.host.allocate(
                max(one.scratch_bytes for one in self._gathered.values())
            )
        self._in_flight: dict[Fetch, _InFlight] = {}
        self._fresh: dict[BlockId, tuple[Lease, Buffer]] = {}
        self._held: dict[tuple[BlockId, int], tuple[Buffer, int]] = {}

    # Moves -------------------------------------------------------------------------------------

    def read(self, task: Task) -> None:
        """SSD -> RAM. Runs on: the read lane."""
        comes_fresh = task.of_pass is Pass.FORWARD and task.block in self._fresh
        pieces = [
            piece
            for piece in self._weights[task.block].pieces
            if self._store.resident_buffer(piece.owner, piece.part) is None
            and not (comes_fresh and piece.owner == task.block and piece.part is Part.P16)
        ]
        if self._gathered:
            pieces = self._own_parts(task.block, pieces)
        lease = task.leases[0]
        total_bytes = sum(piece.nbytes for piece in pieces)
        buffer = self._book.ram_buffer(lease, total_bytes)
        offsets, end_bytes = {}, 0
        tickets: list[StoreTicket] = []
        try:
            for piece in pieces:
                offsets[piece] = end_bytes
                tickets.append(
                    self._store.start_read(
                        piece.owner,
                        piece.part,
                        piece.begin,
                        piece.end,
                        buffer,
                        offset_bytes=end_bytes,
                        priority=Priority.COMPUTE_WAITS,
                    )
                )
                end_bytes += piece.nbytes
        finally:
            wait_for(tickets)
        self._in_flight[fetch_of(task)] = _InFlight(read=buffer, offsets=offsets)
        if lease.pool is PoolName.HELD:
            own = next((p for p in pieces if (p.part, p.owner) == (Part.P16, task.block)), None)
            if own is not None:
                self._held[task.block, task.step] = (buffer, offsets[own])

    def _own_parts(self, block: BlockId, pieces: Sequence[WeightPiece]) -> list[WeightPiece]:
        """What this rank has of pieces, at the places its own store has them."""
        wanted = {_range_of(piece): piece for piece in pieces}
        return [
            replace(
                wanted[one],
                begin=begin,
                end=end,
                in_part=self._store.layout.block(one.owner).byte_range(one.part, begin, end),
            )
            for one, begin, end in self._gathered[block].of_rank(self._peers.rank)
            if begin < end and one in wanted
        ]

    def gather(self, task: Task) -> None:
        """The whole of a segment's weights in RAM. Runs on: the peer lane."""
        flight = self._in_flight.setdefault(fetch_of(task), _InFlight())
        weights, gathered = self._weights[task.block], self._gathered[task.block]
        sources = []
        for one, begin, end in gathered.of_rank(self._peers.rank):
            source = (0, 0)
            if begin < end:
                part = self._own_parts(task.block, [_piece_of(weights, one)])[0]
                memory, at = self._ram_of(flight, part)
                source = (memory.address + at, memory.nbytes - at)
            sources.append(source)
        nbytes = gathered.buffer_bytes(weights.num_bytes)
        buffer = self._book.ram_buffer(task.leases[0], nbytes)
        assert self._scratch is not None
        scratch = over(self._scratch, gathered.scratch_bytes)
        gathered.gather(self._peers, sources, over(buffer, nbytes), scratch, what=task.name)
        flight.read = buffer
        flight.offsets = {piece: piece.offset_bytes for piece in weights.pieces}
        self._taken(task)

    def copy(self, task: Task) -> None:
        """RAM -> GPU, wholly or one piece of it. Runs on: the copy lane."""
        flight = self._in_flight.setdefault(fetch_of(task), _InFlight())
        weights = self._weights[task.block]
        lease = task.leases[0] if task.leases else None
        if self._device.shares_ram:
            if lease is not None:
                self._hand_over(task, flight, weights, lease)
            return
        if lease is not None:
            flight.on_device = self._book.device_memory(lease, weights.on_device.num_bytes)
        assert flight.on_device is not None
        number, count = task.piece
        events = []
        for stretch in weights.on_device.stretches:
            begin, end = _cut(stretch.piece, number, count)
            begin, end = max(begin, stretch.begin), min(end, stretch.end)
            if begin < end:
                memory, at = self._ram_of(flight, stretch.piece)
                source = RamSpan(memory.address + at + begin, end - begin, memory)
                first = stretch.offset_bytes + begin - stretch.begin
                target = flight.on_device.bytes()[first : first + end - begin]
                events.append(self._device.copy_async(target, source, lane=Lane.RAM_TO_GPU))
        for event in events:
            self._device.wait(event)
        if number == count - 1:
            self._taken(task)

    def _ram_of(self, flight: _InFlight, piece: WeightPiece) -> tuple[Buffer, int]:
        if piece in flight.offsets:
            assert flight.read is not None
            return flight.read, flight.offsets[piece]
        resident = self._store.resident_buffer(piece.owner, piece.part)
        if resident is not None:
            return resident, piece.in_part.offset_bytes
        if piece.owner in self._fresh:
            return self._fresh[piece.owner][1], piece.in_part.offset_bytes
        raise bug(f"{piece.part} of block {piece.owner} is copied before it was read to RAM")

    def _hand_over(
        self, task: Task, flight: _InFlight, weights: SegmentWeights, lease: Lease
    ) -> None:
        """Compute from the memory the weights are in, if they are all in one."""
        first = weights.pieces[0]
        is_one = len(weights.pieces) == 1
        if flight.read is not None and len(flight.offsets) == len(weights.pieces):
            flight.in_place = over(flight.read, weights.num_bytes)
            # A held buffer stays leased until its update, which comes after this pass.
            for source in task.returns:
                if source.pool in (PoolName.RING, PoolName.GATHERED):
                    self._book.move(source, lease)
        elif is_one and self._store.resident_buffer(first.owner, first.part) is not None:
            memory, at = self._ram_of(flight, first)
            flight.in_place = over(memory, first.nbytes, at)
        elif is_one and first.owner in self._fresh and first.owner == task.block:
            fresh_lease, buffer = self._fresh[first.owner]
            flight.in_place = over(buffer, first.nbytes)
            self._book.move(fresh_lease, lease)
        else:
            buffer = self._book.ram_buffer(lease, weights.num_bytes)
            flight.in_place = over(buffer, weights.num_bytes)
            for piece in weights.pieces:
                memory, at = self._ram_of(flight, piece)
                ctypes.memmove(
                    buffer.address + piece.offset_bytes, memory.address + at, piece.nbytes
                )
        self._taken(task)

    def _taken(self, task: Task) -> None:
        if task.of_pass is Pass.FORWARD:
            self._fresh.pop(task.block, None)

    # Binding -----------------------------------------------------------------------------------

    def is_in_flight(self, fetch: Fetch) -> bool:
        """Whether a segment's weights have come (those of a lookup do not, for its backward)."""
        return fetch in self._in_flight

    def bind(self, fetch: Fetch) -> None:
        """Put a segment's weights in place. Runs on: the main thread."""
        weights = self._weights[fetch.block]
        if not weights.pieces:
            return
        flight = self._in_flight[fetch]
        if flight.on_device is not None:
            flat, layouts = flight.on_device.bytes(), weights.on_device.layouts
        else:
            assert flight.in_place is not None
            flat, layouts = flight.in_place, weights.layouts
        for owner, layout in layouts.items():
            self._sets[owner].bind(flat, layout)

    def release(self, fetch: Fetch) -> None:
        """Take a segment's weights out; their lease ends with the task. Runs on: the main
        thread."""
        for owner in self._weights[fetch.block].layouts:
            self._sets[owner].release()
        self._in_flight.pop(fetch, None)

    # What updates use --------------------------------------------------------------------------

    def put_fresh(self, block: BlockId, lease: Lease, buffer: Buffer) -> None:
        """New weights, straight from their update, for the next forward pass."""
        self._fresh[block] = (lease, buffer)

    def take_held(self, block: BlockId, step: int) -> tuple[Buffer, int] | None:
        """Weights the backward pass read, and where in the buffer they begin."""
        return self._held.get((block, step))

    def forget_held(self, block: BlockId, step: int) -> None:
        """The update is done with them."""
        self._held.pop((block, step), None)

    def clear(self) -> None:
        """Forget everything: after a failure."""
        for own in self._sets.values():
            own.release()
        self._in_flight.clear()
        self._fresh.clear()
        self._held.clear()
        if self._scratch is not None:
            self._book.host.free(self._scratch)
            self._scratch = None


def _range_of(piece: WeightPiece) -> WeightRange:
    return WeightRange(
        owner=piece.owner,
        part=piece.part,
        begin=piece.begin,
        end=piece.end,
        offset_bytes=piece.offset_bytes,
    )


def _ranges(pieces: Sequence[WeightPiece]) -> tuple[WeightRange, ...]:
    return tuple(_range_of(piece) for piece in pieces)


def _piece_of(weights: SegmentWeights, one: WeightRange) -> WeightPiece:
    return next(piece for piece in weights.pieces if _range_of(piece) == one)


def _cut(piece: WeightPiece, number: int, count: int) -> tuple[int, int]:
    """Bytes of one of `count` cuts; what is frozen, and never updated, goes with the first."""
    if piece.part is Part.FROZEN16 or count == 1:
        return 0, 0 if number else piece.nbytes
    cuts = position_cuts(piece.end - piece.begin, count)
    return 2 * cuts[number], 2 * cuts[number + 1] if number < count - 1 else piece.nbytes


def over(buffer: Buffer, nbytes: int, offset_bytes: int = 0) -> torch.Tensor:
    """Part of a buffer as a flat tensor of bytes."""
    return torch.frombuffer(
        buffer.view[offset_bytes : offset_bytes + nbytes], dtype=torch.uint8, count=nbytes
    )
