"""Sums over reduction groups: 16-bit gradients added in fp32, in the order of the groups.

The first group that has a gradient of a tensor as it is, every further one added to it; nothing is
rounded to 16 bits in between. So the sum depends on how micro-batches are dealt to groups and on
nothing else. Pure; called by the cpu lane.
"""

from collections.abc import Sequence

import torch

from lohan.store import BlockLayout


def fold(
    target: torch.Tensor,
    groups: Sequence[torch.Tensor],
    missing: Sequence[frozenset[str] | None],
    block: BlockLayout,
) -> None:
    """Add up the gradients of a block, or of a rank's slice of it.

    Args:
        target: fp32, all trainable positions of `block`.
        groups: the 16-bit gradients of all groups, as long, in the order of the groups.
        missing: of each group the tensors it has no gradient of; None: of none of them.
    """
    for begin, end, present in _runs(block, missing):
        place = target[begin:end]
        if not present:
            place.zero_()
            continue
        # Not zero plus gradient: that would turn -0.0 into 0.0.
        place.copy_(groups[present[0]][begin:end])
        for number in present[1:]:
            place.add_(groups[number][begin:end])


def _runs(
    block: BlockLayout, missing: Sequence[frozenset[str] | None]
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Stretches of positions whose tensors have gradients in the same groups."""
    places = [place for place in block.places if place.entry.is_trainable]
    ends = [*(place.begin for place in places[1:]), block.num_trainable]
    runs: list[tuple[int, int, tuple[int, ...]]] = []
    for place, end in zip(places, ends, strict=False):
        present = tuple(
            number
            for number, names in enumerate(missing)
            if names is not None and place.entry.name not in names
        )
        begin = place.begin
        if runs and runs[-1][2] == present:
            begin = runs.pop()[0]
        runs.append((begin, end, present))
    return runs
