"""What to swap: the order in which outputs are worth it, and how far down it a step gets shorter.

Most FLOPs saved per byte first (the paper's offloading benefit): every output on its own, as
published, or by what a re-run really saves once operators nobody needs are skipped. The walk is the
published one with its weak points mended: the tensors between blocks are always swapped first,
every prefix of the list is looked at (so a plateau does not end the walk), and the caller's cost
function may include CPU updates, residency and GPU memory. Owns no cost model of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from lohan.model.recompute import recomputation
from lohan.model.shape import BlockShape
from lohan.plan.plan import BlockPlan
from lohan.vocabulary import Choice

_MOST_POINTS = 16
_Item = TypeVar("_Item")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPoint:
    """A prefix of the swap list: its length, bytes (inputs included), FLOPs left to recompute."""

    num_items: int
    swapped_bytes: int
    recompute_flops: int
    largest_block_bytes: int
    """Swapped bytes of the block that swaps most."""


def swap_points(
    orders: Sequence[tuple[SwapStep, ...]], inputs: Sequence[int], recompute_flops: int
) -> list[SwapPoint]:
    """Every prefix of the blocks' merged swap lists, starting from the inputs alone."""
    per_block = list(inputs)
    points = [
        SwapPoint(
            num_items=0,
            swapped_bytes=sum(inputs),
            recompute_flops=recompute_flops,
            largest_block_bytes=max(inputs),
        )
    ]
    for block, step in merged_items(orders):
        last = points[-1]
        per_block[block] += step.nbytes
        points.append(
            SwapPoint(
                num_items=last.num_items + 1,
                swapped_bytes=last.swapped_bytes + step.nbytes,
                recompute_flops=last.recompute_flops - step.saved_flops,
                largest_block_bytes=max(last.largest_block_bytes, per_block[block]),
            )
        )
    return points


def merged_items(orders: Sequence[tuple[SwapStep, ...]]) -> list[tuple[int, SwapStep]]:
    """(block, step) pairs of all blocks, most FLOPs per byte first.

    Within a block the order of its list is kept even where a later step saves more per byte than
    an earlier one: it does so only because the earlier one is there.
    """
    keyed = []
    for block, order in enumerate(orders):
        worth = float("inf")
        for rank, step in enumerate(order):
            worth = min(worth, step.saved_flops / step.nbytes)
            keyed.append((-worth, rank, block, step))
    keyed.sort(key=lambda item: item[:3])
    return [(block, step) for _, _, block, step in keyed]


def best_point(points: Sequence[_Item], seconds: Callable[[_Item], float]) -> _Item:
    """The prefix with the shortest predicted step; among equals the one that swaps least.

    A very long list is looked at in strides first and closely around the best: between two equal
    outputs of neighbouring blocks the predicted time is a straight line but for a few bends.
    """
    stride = -(-len(points) // _MOST_POINTS)
    if stride == 1:
        return _first_best(points, seconds)
    coarse = [*range(0, len(points) - 1, stride), len(points) - 1]
    near = coarse.index(_first_best([*coarse], lambda at: seconds(points[at])))
    begin, end = coarse[max(0, near - 1)], coarse[min(len(coarse) - 1, near + 1)]
    return _first_best(points[begin : end + 1], seconds)


def _first_best(items: Sequence[_Item], seconds: Callable[[_Item], float]) -> _Item:
    best, best_seconds = items[0], seconds(items[0])
    for item in items[1:]:
        candidate = seconds(item)
        # A gain below rounding is no reason to move more bytes.
        if candidate < best_seconds * (1 - 1e-9):
            best, best_seconds = item, candidate
    return best


def assign_tiers(
    orders: Sequence[tuple[SwapStep, ...]],
    inputs: Sequence[int],
    num_items: int,
    ram_bytes: int,
    *,
    bytes_factor: int = 1,
) -> list[BlockPlan]:
    """Choices per block for a prefix: later blocks' activations in RAM, earlier ones on SSD.

    The last blocks' activations come back first, so they wait the shortest; RAM goes to them.
    `bytes_factor` is how many GPUs put the same amount into RAM.
    """
    left = ram_bytes
    found: dict[tuple[int, int | None], Choice] = {}
    pieces = _pieces(orders, inputs, num_items)
    for block in range(len(orders) - 1, -1, -1):
        for index, nbytes in pieces[block]:
            fits = nbytes * bytes_factor <= left
            found[block, index] = Choice.SWAP_TO_RAM if fits else Choice.SWAP_TO_SSD
            if fits:
                left -= nbytes * bytes_factor
    return _block_plans(pieces, found)


def spread_tiers(
    orders: Sequence[tuple[SwapStep, ...]],
    inputs: Sequence[int],
    num_items: int,
    rooms: Sequence[tuple[Choice, int]],
) -> list[BlockPlan]:
    """Choices per block for a prefix, each tier's room spread evenly over the blocks.

    So links and drives have the same to do all along a pass. `rooms` are choices and their bytes
    on one GPU, the best first; what finds none goes to SSD.
    """
    pieces = _pieces(orders, inputs, num_items)
    found: dict[tuple[int, int | None], Choice] = {}
    for choice, room in rooms:
        open_pieces = [
            (block, index, nbytes)
            for block, block_pieces in enumerate(pieces)
            for index, nbytes in block_pieces
            if (block, index) not in found
        ]
        share = min(1.0, room / max(1, sum(nbytes for *_, nbytes in open_pieces)))
        left, due = room, 0.0
        for block, index, nbytes in open_pieces:
            due += share * nbytes
            if nbytes <= left and due >= nbytes * (1 - 1e-9):
                found[block, index] = choice
                left, due = left - nbytes, due - nbytes
        for block, index, nbytes in reversed(open_pieces):
            # What whole pieces left over goes to the last blocks, which wait the shortest.
            if (block, index) not in found and nbytes <= left:
                found[block, index] = choice
                left -= nbytes
    return _block_plans(pieces, found)


def _pieces(
    orders: Sequence[tuple[SwapStep, ...]], inputs: Sequence[int], num_items: int
) -> list[list[tuple[int | None, int]]]:
    """Bytes of each block's input (None) and of its outputs in a prefix."""
    pieces: list[list[tuple[int | None, int]]] = [[(None, nbytes)] for nbytes in inputs]
    for block, step in merged_items(orders)[:num_items]:
        pieces[block].append((step.operator_index, step.nbytes))
    return pieces


def _block_plans(
    pieces: Sequence[Sequence[tuple[int | None, int]]],
    found: Mapping[tuple[int, int | None], Choice],
) -> list[BlockPlan]:
    plans = []
    for block, block_pieces in enumerate(pieces):
        chosen = {index: found.get((block, index), Choice.SWAP_TO_SSD) for index, _ in block_pieces}
        plans.append(
            BlockPlan(
                input_choice=chosen[None],
                choices=tuple(
                    sorted((index, choice) for index, choice in chosen.items() if index is not None)
                ),
            )
        )
    return plans
