"""What one block's decisions cost in a step: FLOPs and bytes, from its shape and its BlockPlan.

Owns the arithmetic that the cost model, the schedule builder and the ledger share. Batch here is
the sequences one GPU computes in a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lohan.model.recompute import recomputation
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan.plan import BlockPlan
from lohan.vocabulary import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """FLOPs and bytes of one block in one step on one GPU."""

    forward_flops: int
    backward_flops: int
    recompute_flops: int
    input_bytes: int
    kept_bytes: int
    """Activations that stay on the GPU, inputs included."""
    to_ram_bytes: int
    """Activations swapped to RAM and left there, inputs included."""
    to_ssd_bytes: int
    """Activations swapped through RAM to SSD, inputs included."""

    @property
    def swapped_bytes(self) -> int:
        """Activations that cross the link between GPU and RAM, each way."""
        return self.to_ram_bytes + self.to_ssd_bytes


def costs_of_blocks(
    shape: ModelShape,
    decisions: Sequence[BlockPlan],
    batch: int,
    sequence: int,
    skips_unneeded: bool,
) -> list[BlockCosts]:
    """Cost of every block of a model."""
    # Most blocks are of one kind with one decision; looking them up by the whole shape would take
    # longer than the sum it saves.
    known: dict[tuple[int, BlockPlan], BlockCosts] = {}
    costs = []
    for key in zip(shape.sequence_of_kinds, decisions, strict=True):
        if key not in known:
            kind, plan = key
            known[key] = block_costs(shape.kinds[kind], plan, batch, sequence, skips_unneeded)
        costs.append(known[key])
    return costs


@lru_cache(maxsize=4096)
def block_costs(
    shape: BlockShape, decisions: BlockPlan, batch: int, sequence: int, skips_unneeded: bool
) -> BlockCosts:
    """Cost of one block under its decisions."""
    bytes_by_choice = dict.fromkeys(Choice, 0)
    input_bytes = shape.input_bytes.at(batch, sequence)
    bytes_by_choice[decisions.input_choice] += input_bytes
    available = set()
    output_bytes = {op.index: op.output_bytes for op in shape.operators}
    for index, choice in decisions.choices:
        bytes_by_choice[choice] += output_bytes[index].at(batch, sequence)
        if choice is not Choice.RECOMPUTE:
            available.add(index)
    if shape.is_rest:
        recompute = 0
    elif skips_unneeded:
        recompute = recomputation(shape, available).flops.at(batch, sequence)
    else:
        recompute = sum(
            op.forward_flops.at(batch, sequence)
            for op in shape.operators
            if op.index not in available
        )
    return BlockCosts(
        forward_flops=shape.forward_flops.at(batch, sequence),
        backward_flops=shape.backward_flops.at(batch, sequence),
        recompute_flops=recompute,
        input_bytes=input_bytes,
        kept_bytes=bytes_by_choice[Choice.KEEP],
        to_ram_bytes=bytes_by_choice[Choice.SWAP_TO_RAM],
        to_ssd_bytes=bytes_by_choice[Choice.SWAP_TO_SSD],
    )
