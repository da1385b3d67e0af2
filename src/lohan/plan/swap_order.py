"""The order in which a block's outputs are worth swapping: most FLOPs saved per byte first.

Owns the ranking only (the paper's offloading benefit); how far down the list to go is decided in
`activations`. Two rankings: every output on its own, as published, or by what a re-run really
saves once operators nobody needs are skipped.
"""

from dataclasses import dataclass
from functools import lru_cache

from lohan.model.recompute import recomputation
from lohan.model.shape import BlockShape


@dataclass(frozen=True, slots=True)
class SwapStep:
    """One more output swapped: its bytes, and the FLOPs its block no longer recomputes."""

    operator_index: int
    nbytes: int
    saved_flops: int


def swappable_indices(shape: BlockShape) -> tuple[int, ...]:
    """Outputs that autograd saves or that cost FLOPs to make again."""
    return tuple(
        op.index for op in shape.operators if op.is_saved or op.forward_flops.at(1, 16) > 0
    )


@lru_cache(maxsize=256)
def swap_order(
    shape: BlockShape, batch: int, sequence: int, skips_unneeded: bool
) -> tuple[SwapStep, ...]:
    """Outputs of a block in the order they should be swapped."""
    sizes = {op.index: op.output_bytes.at(batch, sequence) for op in shape.operators}
    flops = {op.index: op.forward_flops.at(batch, sequence) for op in shape.operators}
    candidates = [index for index in swappable_indices(shape) if sizes[index] > 0]
    if not skips_unneeded:
        ranked = sorted(candidates, key=lambda index: (-flops[index] / sizes[index], index))
        return tuple(SwapStep(index, sizes[index], flops[index]) for index in ranked)

    def rerun_flops(available: frozenset[int]) -> int:
        return recomputation(shape, available).flops.at(batch, sequence)

    steps = []
    available: frozenset[int] = frozenset()
    left = rerun_flops(available)
    while left > 0 and candidates:
        saved = {index: left - rerun_flops(available | {index}) for index in candidates}
        best = max(candidates, key=lambda index: (saved[index] / sizes[index], -index))
        if saved[best] <= 0:
            # No single output helps any more (two that feed one operator would): take the rest
            # by size so that the list still ends with nothing to recompute.
            best = min(candidates, key=lambda index: (sizes[index], index))
        steps.append(SwapStep(best, sizes[best], saved[best]))
        available |= {best}
        left -= saved[best]
        candidates.remove(best)
    return tuple(steps)
