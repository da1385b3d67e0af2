"""The search for what to swap: how far down the swap order the step still gets shorter.

The published walk with its weak points mended: the tensors between blocks are always swapped first,
every prefix of the list is looked at (so a plateau does not end the walk), and the caller's cost
function may include CPU updates, residency and GPU memory. Owns no cost model of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lohan.plan.plan import BlockPlan
from lohan.plan.swap_order import SwapStep
from lohan.vocabulary import Choice

_MOST_POINTS = 1000


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


def best_point(points: Sequence[SwapPoint], seconds: Callable[[SwapPoint], float]) -> SwapPoint:
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


_Item = TypeVar("_Item")


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
    chosen: list[list[SwapStep]] = [[] for _ in orders]
    for block, step in merged_items(orders)[:num_items]:
        chosen[block].append(step)
    left = ram_bytes
    plans: list[BlockPlan] = []
    for block in range(len(orders) - 1, -1, -1):
        choices = []
        pieces = [(None, inputs[block])] + [
            (step.operator_index, step.nbytes) for step in chosen[block]
        ]
        input_choice = Choice.SWAP_TO_RAM
        for index, nbytes in pieces:
            fits = nbytes * bytes_factor <= left
            choice = Choice.SWAP_TO_RAM if fits else Choice.SWAP_TO_SSD
            if fits:
                left -= nbytes * bytes_factor
            if index is None:
                input_choice = choice
            else:
                choices.append((index, choice))
        plans.append(BlockPlan(input_choice=input_choice, choices=tuple(sorted(choices))))
    return plans[::-1]
