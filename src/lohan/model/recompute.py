"""What must be run again for a block's backward pass, given the outputs that are at hand.

Owns this one question, as pure functions over a `BlockShape`. The block's input is always at hand.
Called by the planner for every choice it weighs; does not know where outputs are kept.
"""

from collections.abc import Collection
from dataclasses import dataclass

from lohan.errors import ConfigError
from lohan.model.shape import INPUT, BlockShape, Growth


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Operators to run again before a block's backward pass, and what that costs.

    Attributes:
        operators: their `index`, in the order to run them.
        flops: their forward FLOPs.
    """

    operators: tuple[int, ...]
    flops: Growth


def recomputation(block: BlockShape, available: Collection[int]) -> Recomputation:
    """Return what to run again so that everything autograd keeps exists.

    An operator is run again if its output is not available and either autograd keeps it or an
    operator that is run again reads it. So a projection whose result only goes into a sum that
    autograd does not keep (`mlp.fc2` of a GPT block) is never run again, swapped or not.

    Args:
        block: the block.
        available: `index` of operators whose outputs were kept or swapped.

    Raises:
        ConfigError: if `available` names an operator the block does not have.
    """
    by_index = {operator.index: operator for operator in block.operators}
    unknown = sorted(set(available) - by_index.keys())
    if unknown:
        raise ConfigError(
            f"operators {unknown} are not in block {block.name!r}",
            why=f"it has {sorted(by_index)}",
            remedy="make the plan for this model's shape",
        )
    available = frozenset(available)
    waiting = [o.index for o in block.operators if o.is_saved and o.index not in available]
    again: set[int] = set()
    while waiting:
        index = waiting.pop()
        if index in again:
            continue
        again.add(index)
        reads = by_index[index].inputs
        waiting += [read for read in reads if read != INPUT and read not in available]
    rerun = [by_index[index] for index in sorted(again)]
    return Recomputation(
        operators=tuple(operator.index for operator in rerun),
        flops=Growth.total(operator.forward_flops for operator in rerun),
    )
