"""What decisions cost in a step: FLOPs and bytes of one block, and of a finished plan.

Owns the arithmetic that the cost model, the schedule builder and the ledger share, and the estimate
of a plan whose blocks have decided: a search deals in shares of tensors and of blocks, this is the
same once they are whole. Batch here is the sequences one GPU computes in a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lohan.hardware.machine import Machine
from lohan.model.recompute import recomputation
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan.cost import BACKWARD_LAUNCHES, StepLoad, Traffic, step_load
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.pools import trained_parameters
from lohan.vocabulary import BlockId, Choice, TensorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """FLOPs and bytes of one block in one step on one GPU."""

    forward_flops: int
    backward_flops: int
    recompute_flops: int
    forward_launches: int
    """Operators the host launches, of one micro-batch."""
    recompute_launches: int
    input_bytes: int
    kept_bytes: int
    """Activations that stay on the GPU, inputs included."""
    to_ram_bytes: int
    """Activations swapped to RAM and left there, inputs included."""
    to_ssd_bytes: int
    """Activations swapped through RAM to SSD, inputs included."""

    @property
    def backward_launches(self) -> int:
        """Operators of the backward pass itself: about what autograd runs for them."""
        return BACKWARD_LAUNCHES * self.forward_launches

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
        recompute = num_again = 0
    elif skips_unneeded:
        again = recomputation(shape, available)
        recompute, num_again = again.flops.at(batch, sequence), len(again.operators)
    else:
        left_out = [op for op in shape.operators if op.index not in available]
        recompute = sum(op.forward_flops.at(batch, sequence) for op in left_out)
        num_again = len(left_out)
    return BlockCosts(
        forward_flops=shape.forward_flops.at(batch, sequence),
        backward_flops=shape.backward_flops.at(batch, sequence),
        recompute_flops=recompute,
        forward_launches=shape.num_launches,
        # Views are run again with the operators they are of.
        recompute_launches=shape.num_launches * num_again // max(1, len(shape.operators)),
        input_bytes=input_bytes,
        kept_bytes=bytes_by_choice[Choice.KEEP],
        to_ram_bytes=bytes_by_choice[Choice.SWAP_TO_RAM],
        to_ssd_bytes=bytes_by_choice[Choice.SWAP_TO_SSD],
    )


def traffic_of(plan: Plan) -> Traffic:
    """What a plan's decisions move and compute, block by block: no fluid shares."""
    trained = trained_parameters(plan.shape)
    num_gpus = plan.num_gpus
    costs = costs_of_blocks(
        plan.computed_shape,
        plan.blocks,
        plan.batch_per_gpu,
        plan.workload.sequence,
        plan.system.skips_unneeded,
    )
    read = written = states = 0
    for number, block in enumerate(plan.blocks):
        kind = plan.block_shape(BlockId(number))
        if TensorKind.P16 not in block.residents:
            read += 2 * kind.num_parameters
            written += 2 * trained[number]
        if TensorKind.OS32 not in block.residents:
            states += 10 * trained[number]
    inner = costs[1:-1]
    return Traffic(
        forward_flops=sum(cost.forward_flops for cost in costs),
        backward_flops=sum(cost.backward_flops for cost in costs),
        recompute_flops=sum(cost.recompute_flops for cost in inner),
        forward_launches=plan.num_micro_batches * sum(cost.forward_launches for cost in costs),
        num_parameters=sum(trained),
        swapped_bytes=sum(cost.swapped_bytes for cost in costs) * num_gpus,
        spilled_bytes=sum(cost.to_ssd_bytes for cost in costs) * num_gpus,
        state_read_bytes=states,
        state_written_bytes=states + written,
        weight_read_bytes=read,
        weight_copy_bytes=2 * plan.shape.num_parameters * num_gpus,
        gradient_spill_bytes=2 * sum(trained) * plan.system.spills_gradients,
    )


def planned_load(plan: Plan, machine: Machine) -> StepLoad:
    """The estimate of a plan of `lohan+` as its blocks really decide."""
    return step_load(machine, traffic_of(plan), clips=plan.workload.clips_gradients)


def least_seconds(plan: Plan, machine: Machine) -> float:
    """What no order of a plan's tasks can beat: the busy time of its busiest resource, or of both
    passes but for a block, whose transfers buffers let lie outside the pass they belong to."""
    clips = plan.workload.clips_gradients
    # Weights that come straight from their update are not read for the forward pass.
    load = step_load(machine, traffic_of(plan), weight_reads=1.0, clips=clips)
    passes = (1 - 1 / len(plan.blocks)) * (load.forward_seconds + load.backward_seconds)
    return max(load.longest_seconds, passes)
