"""How the flat arrays of a block are cut among ranks, and tensors with them.

Rank r owns the r-th of equal slices, which begin at leaves of the gradient's norm and at pages of
every part; the last ones may be shorter, or empty. So what a rank stores is a store like any other,
of a layout whose tensors are the parts of tensors that lie in its slice. Pure; used by `attach` and
by whoever moves weights and gradients.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from lohan.optimizer import LEAF_ELEMENTS
from lohan.store import GRAIN, BlockLayout, StateLayout, TensorEntry
from lohan.store.initial import Moments

SLICE_STEP = math.lcm(GRAIN, LEAF_ELEMENTS)
"""Slices begin at multiples of so many positions."""


def slice_length(num_positions: int, num_ranks: int) -> int:
    """Positions of every slice but the last ones."""
    if num_ranks == 1:
        return num_positions
    return -(-num_positions // (num_ranks * SLICE_STEP)) * SLICE_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The place of one rank among all."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, num_positions: int) -> tuple[int, int]:
        """Positions [begin, end) of an array that are this rank's."""
        begin = self.rank * (length := slice_length(num_positions, self.num_ranks))
        return min(begin, num_positions), min(begin + length, num_positions)

    def inside(self, num_positions: int, begin: int, end: int) -> tuple[int, int]:
        """Which of positions [begin, end) are this rank's, counted from the begin of its slice."""
        first, last = self.of(num_positions)
        cut = max(begin, first), min(end, last)
        return (cut[0] - first, cut[1] - first) if cut[0] < cut[1] else (0, 0)

    def layout(self, whole: StateLayout) -> StateLayout:
        """What this rank stores of a model."""
        if self.num_ranks == 1:
            return whole
        return StateLayout(
            compute_format=whole.compute_format,
            master_format=whole.master_format,
            blocks=tuple(
                BlockLayout(
                    name=block.name,
                    compute_format=block.compute_format,
                    master_format=block.master_format,
                    tensors=tuple(
                        replace(entry, shape=(end - begin,))
                        for entry, begin, end in self._parts(block)
                    ),
                )
                for block in whole.blocks
            ),
        )

    def tensors(
        self, whole: StateLayout, values: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parts of tensors, as they come; names that are not known come as they are."""
        if self.num_ranks == 1:
            yield from values
            return
        parts = self._by_name(whole)
        for name, tensor in values:
            if name not in whole.names or tuple(tensor.shape) != whole_shape(whole, name):
                yield name, tensor  # to be refused
            elif name in parts:
                yield name, tensor.reshape(-1)[slice(*parts[name])]

    def moments(self, whole: StateLayout, given: Moments | None) -> Moments | None:
        """This rank's parts of moments."""
        if given is None or self.num_ranks == 1:
            return given
        parts = self._by_name(whole)

        def cut(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            first, second = given(name)
            part = slice(*parts[name])
            return first.reshape(-1)[part], second.reshape(-1)[part]

        return cut

    def _by_name(self, whole: StateLayout) -> dict[str, tuple[int, int]]:
        return {
            entry.name: (begin, end)
            for block in whole.blocks
            for entry, begin, end in self._parts(block)
        }

    def _parts(self, block: BlockLayout) -> Iterator[tuple[TensorEntry, int, int]]:
        """Tensors with elements here, and which of them: [begin, end)."""
        for place in block.places:
            entry = place.entry
            whole = block.num_trainable if entry.is_trainable else block.num_frozen
            first, last = self.of(whole)
            begin, end = max(place.begin, first), min(place.end, last)
            if begin < end:
                yield entry, begin - place.begin, end - place.begin


def whole_shape(layout: StateLayout, name: str) -> tuple[int, ...]:
    """The shape a tensor has when its parts are put together."""
    return layout.find(name)[1].entry.shape
