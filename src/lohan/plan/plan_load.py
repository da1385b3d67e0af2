"""The estimate of a finished plan: what its blocks' decisions really move and compute.

A search deals in shares of tensors and of blocks; this is the same arithmetic once they are whole.
Called to compare finished plans before they are simulated.
"""

from lohan.hardware.machine import Machine
from lohan.plan.block_costs import costs_of_blocks
from lohan.plan.cost import StepLoad, Traffic, step_load
from lohan.plan.plan import Plan
from lohan.plan.pools import trained_parameters
from lohan.vocabulary import BlockId, TensorKind


def traffic_of(plan: Plan) -> Traffic:
    """What a plan's decisions move and compute, block by block: no fluid shares."""
    trained = trained_parameters(plan.shape)
    num_gpus = plan.num_gpus
    costs = costs_of_blocks(
        plan.shape,
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
