"""Tensors out of the store: fp32 masters and moments, one tensor at a time.

Owns cutting a tensor's positions into pages, reading ahead of nothing (it is for exports and
tests), rebuilding masters, and putting the slices of several ranks together. Called through
`StateStore.masters` and `moments`; joined by whoever looks at runs that were left (`lohan check`,
`export`), for whom one rank alone is the simple case.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lohan import _native
from lohan.ssd import ALIGNMENT_BYTES, Buffer
from lohan.store.files.tickets import StoreTicket, wait_for
from lohan.store.format.layout import GRAIN, ComputeFormat, MasterFormat, Part, TensorPlace
from lohan.vocabulary import BlockId

if TYPE_CHECKING:
    from lohan.store.seals.manifest import Manifest
    from lohan.store.states import StateStore


def read_masters(
    store: "StateStore", scratch: Buffer, *, are_frozen_wanted: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and fp32 master of every tensor, block by block. May block: yes.

    None is held here once it is given away: whoever lets go of it needs no room for two.
    """
    for number, block in enumerate(store.layout.blocks):
        for place in block.places:
            if not (are_frozen_wanted or place.entry.is_trainable):
                continue
            yield place.entry.name, _master(store, BlockId(number), place, scratch)


def read_moments(
    store: "StateStore", scratch: Buffer
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, m and v of every trainable tensor; v without the tie in its sign. May block: yes.

    Not held either.
    """
    for number, block in enumerate(store.layout.blocks):
        for place in block.places:
            if place.entry.is_trainable:
                yield place.entry.name, *_moments(store, BlockId(number), place, scratch)


def _master(
    store: "StateStore", block: BlockId, place: TensorPlace, scratch: Buffer
) -> torch.Tensor:
    is_split = store.layout.master_format is MasterFormat.SPLIT
    trainable = (Part.P16, Part.LO16, Part.V32) if is_split else (Part.P32,)
    parts = trainable if place.entry.is_trainable else (Part.FROZEN16,)
    master = _empty(place.entry.num_parameters)
    for pieces, target in _pieces(store, block, place, parts, scratch, [master]):
        _rebuild(store.layout.compute_format, pieces, target[0])
    return master.view(place.entry.shape)


def _moments(
    store: "StateStore", block: BlockId, place: TensorPlace, scratch: Buffer
) -> tuple[torch.Tensor, torch.Tensor]:
    m, v = (_empty(place.entry.num_parameters) for _ in range(2))
    for pieces, targets in _pieces(store, block, place, (Part.M32, Part.V32), scratch, [m, v]):
        targets[0].copy_(pieces[0])
        torch.abs(pieces[1], out=targets[1])
    return m.view(place.entry.shape), v.view(place.entry.shape)


def _empty(count: int) -> torch.Tensor:
    # Whatever type and device a program has made its defaults.
    return torch.empty(count, dtype=torch.float32, device="cpu")


def _pieces(
    store: "StateStore",
    block: BlockId,
    place: TensorPlace,
    parts: Sequence[Part],
    scratch: Buffer,
    outputs: Sequence[torch.Tensor],
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The parts of a tensor piece by piece, with the piece of each output they belong to."""
    layout = store.layout.block(block)
    room_bytes = scratch.nbytes // len(parts) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    num_positions = room_bytes // 4 // GRAIN * GRAIN
    position = place.begin
    while position < place.end:
        begin = position // GRAIN * GRAIN
        end = min(begin + num_positions, layout.num_positions(parts[0]))
        if end >= place.end:
            end = min(-(-place.end // GRAIN) * GRAIN, layout.num_positions(parts[0]))
        after = min(end, place.end)
        tickets: list[StoreTicket] = []
        try:
            for number, part in enumerate(parts):
                tickets.append(
                    store.start_read(
                        block, part, begin, end, scratch, offset_bytes=number * room_bytes
                    )
                )
        finally:
            wait_for(tickets)
        inside = slice(position - begin, after - begin)
        outside = slice(position - place.begin, after - place.begin)
        yield (
            [ticket.tensor()[inside] for ticket in tickets],
            [output[outside] for output in outputs],
        )
        position = after


def _rebuild(
    compute_format: ComputeFormat, pieces: Sequence[torch.Tensor], target: torch.Tensor
) -> None:
    count = target.numel()
    if len(pieces) == 3:
        p16, lo16, v32 = pieces
        _native.join_masters(
            p16=p16.data_ptr(),
            lo16=lo16.data_ptr(),
            v32=v32.data_ptr(),
            p32=target.data_ptr(),
            num_elements=count,
            num_threads=1,
        )
    elif pieces[0].dtype is torch.float32:
        target.copy_(pieces[0])
    else:
        _native.convert(
            source=pieces[0].data_ptr(),
            source_format=compute_format.value,
            target=target.data_ptr(),
            target_format="fp32",
            num_elements=count,
            num_threads=1,
        )


class JoinedStates:
    """The stores of all ranks of a run, in their order, of one seal."""

    def __init__(self, stores: Sequence["StateStore"]) -> None:
        self._stores, self.num_ranks = stores, len(stores)

    @property
    def sealed(self) -> "Manifest":
        """Of the first rank, which speaks for all."""
        sealed = self._stores[0].sealed
        assert sealed is not None, "stores are opened from a seal"
        return sealed

    @property
    def compute_format(self) -> ComputeFormat:
        """What weights are computed with."""
        return self._stores[0].layout.compute_format

    @property
    def state_bytes(self) -> int:
        """Of all ranks together."""
        return sum(
            block.part_bytes(part)
            for store in self._stores
            for block in store.layout.blocks
            for part in block.parts
        )

    @property
    def trained(self) -> frozenset[str]:
        """The tensors that have states."""
        entries = [e for one in self._stores for b in one.layout.blocks for e in b.tensors]
        return frozenset(entry.name for entry in entries if entry.is_trainable)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor; of several ranks its number of elements, which is all they know."""
        entries = [e for one in self._stores for b in one.layout.blocks for e in b.tensors]
        if self.num_ranks == 1:
            return {entry.name: entry.shape for entry in entries}
        sizes: Counter[str] = Counter()
        for entry in entries:
            sizes[entry.name] += entry.num_parameters
        return {name: (size,) for name, size in sizes.items()}

    def masters(self, *, are_frozen_wanted: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor's name and fp32 master, streaming; of several ranks without its shape."""
        if self.num_ranks == 1:
            yield from self._stores[0].masters(are_frozen_wanted=are_frozen_wanted)
            return
        with contextlib.ExitStack() as stack:
            own = [one.masters(are_frozen_wanted=are_frozen_wanted) for one in self._stores]
            for one in own:
                stack.callback(one.close)  # type: ignore[attr-defined]
            for blocks in zip(*(store.layout.blocks for store in self._stores), strict=True):
                names = [
                    [e.name for e in block.tensors if are_frozen_wanted or e.is_trainable]
                    for block in blocks
                ]
                for name, holders in _merged(names):
                    yield name, torch.cat([next(own[rank])[1].view(-1) for rank in holders])


def _merged(lists: list[list[str]]) -> Iterator[tuple[str, list[int]]]:
    """Names in an order that all lists keep, and which lists have each."""
    while any(lists):
        heads = [own[0] for own in lists if own]
        name = next(n for n in heads if all(n not in own[1:] for own in lists))
        holders = [number for number, own in enumerate(lists) if own and own[0] == name]
        for number in holders:
            lists[number].pop(0)
        yield name, holders
