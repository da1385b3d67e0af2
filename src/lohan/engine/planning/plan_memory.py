"""Main memory and GPU memory of a plan as the engine takes it: pools, residents, and roundings.

Owns what alignment adds to the ledger's sizes. Used by `plan_run`, which checks that it fits, and
by those who allocate.
"""

from collections.abc import Mapping

from lohan.lanes.weight_map import DEVICE_ALIGNMENT_BYTES
from lohan.parallel.slices import SLICE_STEP
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.pools import weights_bytes
from lohan.schedule import RollingSchedule
from lohan.schedule.task import Pool
from lohan.store import StateLayout, parts_of_kinds, resident_bytes
from lohan.vocabulary import BlockId, PoolName, TensorKind, Tier

_PAGE_BYTES = 4096


def needed_ram_bytes(plan: Plan, layout: StateLayout) -> int:
    """RAM of the schedule's pools in RAM, of what is resident, and of roundings."""
    residents = parts_of_kinds(layout, kinds_in_ram(plan))
    return (
        pools_bytes(RollingSchedule(plan).pools, {Tier.RAM})
        + resident_bytes(layout, residents)
        + rounding_bytes(layout)
        + swap_rounding_bytes(plan)
        + peers_bytes(plan)
    )


def kinds_in_ram(plan: Plan) -> list[list[TensorKind]]:
    """State kinds of each block that live in RAM."""
    states = (TensorKind.P16, TensorKind.P32, TensorKind.OS32)
    return [
        [kind for kind in states if plan.home_of(BlockId(number), kind) is Tier.RAM]
        for number in range(len(plan.blocks))
    ]


def pools_bytes(pools: Mapping[PoolName, Pool], tiers: set[Tier]) -> int:
    """Capacity of all pools of some tiers."""
    return sum(pool.capacity_bytes for pool in pools.values() if pool.tier in tiers)


def rounding_bytes(layout: StateLayout) -> int:
    """What rounding to pages, to pieces of updates and between tensors adds to buffers, at most."""
    num_tensors = max((len(block.tensors) for block in layout.blocks), default=0)
    per_piece = 14 * (2 * 4096) + 6 * _PAGE_BYTES + 14 * 32 * num_tensors
    return 8 * per_piece + (4 * len(layout.blocks) + 32) * (_PAGE_BYTES + 64 * num_tensors)


def gpu_rounding_bytes(layout: StateLayout) -> int:
    """The same of the buffers for weights and gradients on the GPU, two of each."""
    num_tensors = max((len(block.tensors) for block in layout.blocks), default=0)
    return 4 * (_PAGE_BYTES + 64 * num_tensors)


def peers_bytes(plan: Plan) -> int:
    """What ranks need to sort the weights that arrive, and what equal slices add to buffers."""
    workload = plan.workload
    if workload.num_ranks == 1:
        return 0
    num_buffers = 3 * plan.system.num_ring_slots + 4 * workload.groups_per_rank + 8
    slack = num_buffers * workload.num_ranks * 4 * SLICE_STEP
    return 2 * max(weights_bytes(plan.shape)) + slack


def swap_rounding_bytes(plan: Plan) -> int:
    """What aligning swapped outputs adds, at most."""
    return sum(area_slack_bytes(block, plan.num_micro_batches) for block in plan.blocks)


def area_slack_bytes(block: BlockPlan, num_micro_batches: int) -> int:
    """The same for one block and tier."""
    # Operators may have more than one output, and several tensors may enter a block.
    num_outputs = 4 * (len(block.choices) + 4) * num_micro_batches
    return DEVICE_ALIGNMENT_BYTES * num_outputs + _PAGE_BYTES
