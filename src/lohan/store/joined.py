"""The sealed states of a run of several ranks, read as one: slices put together tensor by tensor.

Owns nothing that is written. Called by whoever looks at runs that were left (`lohan check`,
`export`); one rank alone is the simple case.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from lohan.store.format.parts import ComputeFormat
from lohan.store.seals.manifest import Manifest
from lohan.store.states import StateStore


class JoinedStates:
    """The stores of all ranks of a run, in their order, of one seal."""

    def __init__(self, stores: Sequence[StateStore]) -> None:
        self._stores, self.num_ranks = stores, len(stores)

    @property
    def sealed(self) -> Manifest:
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
