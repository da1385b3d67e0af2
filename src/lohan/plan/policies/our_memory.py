"""The ledger of `lohan+`: every pool of the schedule, the working set of a block, the residents.

Sizes here are the capacities of the schedule's pools, so what the simulator and the engine lease
stays within the ledger by construction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.block_costs import costs_of_blocks
from lohan.plan.ledger import Ledger, LedgerLine
from lohan.plan.ledger import ledger_line as line
from lohan.plan.plan import BlockPlan
from lohan.plan.policies.gpu_floor import GpuFloor
from lohan.plan.policies.our_buffers import Buffers
from lohan.plan.pools import BlockSizes, pool_sizes, updated_parameters
from lohan.plan.system import System
from lohan.plan.workload import Workload
from lohan.vocabulary import PoolName, TensorKind, Tier

# What the driver, the allocator's fragments and the framework's own workspaces take.
GPU_SHARE = 0.92
# What the operating system and the bare process need.
RAM_SHARE = 0.90
# Numbers of micro-batches that are planned with before the best is taken.
_NUM_COUNTS = 3


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def micro_batch_counts(
    system: System, machine: Machine, shape: ModelShape, workload: Workload
) -> list[tuple[int, System]]:
    """Numbers of micro-batches whose blocks fit on the GPU, with as many buffers as that leaves.

    The fewest first and then some more; whatever needs least where none fits. A workload that says
    how many gets so many, whether they fit or not.
    """
    budget = int(machine.gpu.memory_bytes * GPU_SHARE)
    batch, sequence = workload.batch_per_gpu(machine.num_gpus), workload.sequence
    given = workload.num_micro_batches
    counts = _divisors(batch) if given is None else [given]
    sizes = BlockSizes.of(shape, workload)
    floors = {count: GpuFloor.of(shape, batch, count, sequence) for count in counts}

    def needed(count: int, weight_slots: int, gradient_slots: int) -> int:
        return floors[count].total_bytes(with_slots(weight_slots, gradient_slots), sizes, count)

    def with_slots(weight_slots: int, gradient_slots: int) -> System:
        return replace(system, num_weight_slots=weight_slots, num_gradient_slots=gradient_slots)

    # One buffer instead of two costs overlap at every block, a micro-batch more does not: weights
    # move once per step however many there are.
    found = []
    for count in counts:
        slots = next((own for own in (2, 1) if needed(count, 2, own) <= budget), None)
        if slots is not None:
            found.append((count, with_slots(2, slots)))
    # Gradients of shared weights wait once per micro-batch, so that the most may not need least.
    least = min(reversed(counts), key=lambda count: needed(count, 1, 1))
    return found[:_NUM_COUNTS] or [(least, with_slots(1, 1))]


@dataclass(frozen=True)
class OurMemory:
    """Sizes of everything a plan of `lohan+` holds."""

    system: System
    machine: Machine
    shape: ModelShape
    workload: Workload
    num_micro_batches: int
    buffers: Buffers

    @cached_property
    def batch(self) -> int:
        """Sequences per GPU and step."""
        return self.workload.batch_per_gpu(self.machine.num_gpus)

    @cached_property
    def budgets(self) -> dict[Tier, int]:
        """Bytes allowed per tier."""
        return {
            Tier.GPU: int(self.machine.gpu.memory_bytes * GPU_SHARE),
            Tier.RAM: int(self.machine.ram_bytes * RAM_SHARE),
            Tier.SSD: self.machine.ssd_capacity_bytes,
        }

    @cached_property
    def block_sizes(self) -> BlockSizes:
        """Largest and total weights and gradients of the blocks."""
        return BlockSizes.of(self.shape, self.workload)

    def pool_bytes(self, gradient_slots: int | None) -> dict[PoolName, int]:
        """RAM of each streaming pool with so many blocks of gradients waiting."""
        return pool_sizes(
            self.system,
            self.block_sizes,
            num_update_parts=self.buffers.num_update_parts,
            gradient_slots=gradient_slots,
        )

    def spare_ram_bytes(self, gradient_slots: int | None) -> int:
        """RAM that streaming leaves, whatever is swapped or resident."""
        return max(0, self.budgets[Tier.RAM] - sum(self.pool_bytes(gradient_slots).values()))

    @cached_property
    def floor(self) -> GpuFloor:
        """GPU memory that no choice of activations changes."""
        return GpuFloor.of(self.shape, self.batch, self.num_micro_batches, self.workload.sequence)

    @cached_property
    def spare_gpu_bytes(self) -> int:
        """GPU memory beyond weights, gradients and one block's working set."""
        floor = self.floor
        needed = floor.total_bytes(self.system, self.block_sizes, self.num_micro_batches)
        # What is on its way is counted with the choices that make it move.
        moving = self.moving_bytes_of(floor.largest_input_bytes)
        return max(0, self.budgets[Tier.GPU] - needed + moving)

    def moving_bytes_of(self, swapped_bytes: int) -> int:
        """GPU memory for swapped outputs of the block at work and its neighbour, a micro-batch."""
        return 2 * -(-swapped_bytes // self.num_micro_batches)

    def _states_line(self, slot_bytes: int, frozen_bytes: int, other_bytes: int) -> LedgerLine:
        """Two slots per block, so that a sealed checkpoint is never overwritten; one where that
        leaves the drives too little for what else is on them. What is frozen is there once."""
        if 2 * slot_bytes + frozen_bytes + other_bytes <= self.budgets[Tier.SSD]:
            purpose, num_slots = "states in two slots", 2
        else:
            purpose = "states in one slot (two do not fit: a crash in a step loses the run)"
            num_slots = 1
        return line(Tier.SSD, purpose, num_slots * slot_bytes + frozen_bytes, "add a drive")

    def ledger(self, plans: Sequence[BlockPlan], gradient_slots: int | None) -> Ledger:
        """Every line of the plan."""
        shape, num_gpus = self.shape, self.machine.num_gpus
        costs = costs_of_blocks(
            shape, plans, self.batch, self.workload.sequence, skips_unneeded=True
        )
        moving = self.moving_bytes_of(max(cost.swapped_bytes for cost in costs))
        blocks, floor = self.block_sizes, self.floor
        sizes = self.pool_bytes(gradient_slots)
        counts = [self.workload.slice_of(kind.num_parameters) for kind in shape.blocks]
        trained = updated_parameters(shape, self.workload)
        resident = sum(
            2 * own * (TensorKind.P16 in plan.residents)
            + 10 * changing * (TensorKind.OS32 in plan.residents)
            for own, changing, plan in zip(counts, trained, plans, strict=True)
        )
        frozen = 2 * sum(
            (own - changing) * (TensorKind.P16 not in plan.residents)
            for own, changing, plan in zip(counts, trained, plans, strict=True)
        )
        weights = self.system.num_weight_slots * blocks.largest_weights_bytes
        gradients = self.system.num_gradient_slots * blocks.largest_gradient_bytes
        kept = sum(cost.kept_bytes for cost in costs)
        ahead = sizes[PoolName.RING] + sizes[PoolName.HELD] + sizes[PoolName.FRESH]
        in_ram = sum(cost.to_ram_bytes for cost in costs) * num_gpus
        on_ssd = max(cost.to_ssd_bytes for cost in costs) * num_gpus
        spilling = self.system.num_spill_slots * on_ssd
        batch_remedy = "use a smaller batch or a shorter sequence"
        block_remedy = "use a GPU with more memory or a model with smaller blocks"
        split_remedy = "use a GPU with more memory or fewer micro-batches"
        ram_remedy = "give it more RAM"
        swapped_to_ssd = sum(cost.to_ssd_bytes for cost in costs) * num_gpus
        spilled = blocks.all_gradients_bytes * self.system.spills_gradients
        lines = [
            line(Tier.GPU, "weights in flight", weights, block_remedy),
            line(Tier.GPU, "gradients", gradients, block_remedy),
            *(
                line(Tier.GPU, purpose, nbytes, remedy, is_constant=True)
                for purpose, nbytes, remedy in (
                    ("the block at work", floor.working_bytes, batch_remedy),
                    ("gradients of shared weights", floor.shared_gradient_bytes, split_remedy),
                    ("activations between two blocks", floor.between_bytes, batch_remedy),
                    ("activations outside blocks", floor.rest_bytes, batch_remedy),
                )
            ),
            line(Tier.GPU, "activations on their way", moving, batch_remedy),
            line(Tier.GPU, "activations kept", kept, batch_remedy),
            line(Tier.RAM, "weights read ahead", ahead, ram_remedy),
            line(
                Tier.RAM,
                "weights and gradients of peers",
                sizes[PoolName.GATHERED] + sizes[PoolName.EXCHANGED],
                ram_remedy,
            ),
            line(Tier.RAM, "states in flight", sizes[PoolName.STATES], ram_remedy),
            line(Tier.RAM, "gradients waiting", sizes[PoolName.WAITING], ram_remedy),
            line(Tier.RAM, "swapped activations", in_ram, batch_remedy),
            line(Tier.RAM, "activations on their way", spilling, batch_remedy),
            line(Tier.RAM, "resident states", resident, ram_remedy, is_constant=True),
            self._states_line(
                2 * sum(counts) + 10 * sum(trained) - resident - frozen,
                frozen,
                swapped_to_ssd + spilled,
            ),
            line(Tier.SSD, "swapped activations", swapped_to_ssd, "add a drive"),
            line(Tier.SSD, "waiting gradients", spilled, "add a drive"),
        ]
        return Ledger(lines=tuple(lines), budgets=self.budgets)
