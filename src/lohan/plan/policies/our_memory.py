"""The ledger of `lohan+`: every pool of the schedule, the working set of a block, the residents.

Sizes here are the capacities of the schedule's pools, so what the simulator and the engine lease
stays within the ledger by construction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lohan.hardware.machine import Machine
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan.block_costs import BlockCosts, block_costs
from lohan.plan.ledger import Ledger, LedgerLine
from lohan.plan.plan import BlockPlan
from lohan.plan.pools import NUM_SPILL_SLOTS, BlockSizes, pool_sizes, trained_parameters
from lohan.plan.system import System
from lohan.plan.workload import Workload
from lohan.vocabulary import BlockId, TensorKind, Tier

# What the driver, the allocator's fragments and the framework's own workspaces take.
GPU_SHARE = 0.92
# What the operating system and the bare process need.
RAM_SHARE = 0.90
# Blocks of G16 in RAM that updates under the backward pass need to keep the lanes busy.
MIN_GRADIENT_SLOTS = 4


def working_bytes(kind: BlockShape, micro_batch: int, sequence: int) -> int:
    """GPU memory one block's backward pass needs for activations and their gradients."""
    largest_output = max(
        (op.output_bytes.at(micro_batch, sequence) for op in kind.operators), default=0
    )
    return (
        kind.saved_bytes.at(micro_batch, sequence)
        + kind.input_bytes.at(micro_batch, sequence)
        + kind.output_bytes.at(micro_batch, sequence)
        # The gradient that comes in and the one being made.
        + 2 * largest_output
    )


def _gpu_floor(
    system: System, shape: ModelShape, batch: int, num_micro_batches: int, sequence: int
) -> int:
    micro_batch = batch // num_micro_batches
    sizes = BlockSizes.of(shape)
    working = max(working_bytes(kind, micro_batch, sequence) for kind in shape.kinds)
    # All micro-batches are between the same two blocks at a time: what entered and what left.
    inputs = max(kind.input_bytes.at(batch, sequence) for kind in shape.kinds)
    # The head's input stays, and one micro-batch's share of two blocks is on its way to RAM.
    activations = working + 2 * inputs + 2 * -(-inputs // num_micro_batches)
    return (
        system.num_weight_slots * sizes.largest_weights_bytes
        + system.num_gradient_slots * sizes.largest_gradient_bytes
        + activations
    )


def _divisors(number: int) -> list[int]:
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def minimum_micro_batches(
    system: System,
    machine: Machine,
    shape: ModelShape,
    batch: int,
    sequence: int,
    given: int | None = None,
) -> tuple[int, System]:
    """Fewest micro-batches whose blocks fit on the GPU, with as many buffers as that leaves.

    `given`: so many, whether they fit or not.
    """
    budget = int(machine.gpu.memory_bytes * GPU_SHARE)
    sparest = replace(system, num_weight_slots=1, num_gradient_slots=1)
    counts = _divisors(batch) if given is None else [given]
    for num_micro_batches in counts:
        for weight_slots, gradient_slots in ((2, 2), (2, 1), (1, 1)):
            candidate = replace(
                system, num_weight_slots=weight_slots, num_gradient_slots=gradient_slots
            )
            needed = _gpu_floor(candidate, shape, batch, num_micro_batches, sequence)
            # One buffer instead of two costs overlap at every block, a micro-batch more does not:
            # weights move once per step however many there are.
            if needed <= budget and (weight_slots == 2 or num_micro_batches == counts[-1]):
                return num_micro_batches, candidate
    return counts[-1], sparest


@dataclass(frozen=True)
class OurMemory:
    """Sizes of everything a plan of `lohan+` holds."""

    system: System
    machine: Machine
    shape: ModelShape
    workload: Workload
    num_micro_batches: int
    num_update_parts: int

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
        return BlockSizes.of(self.shape)

    @cached_property
    def buffer_bytes(self) -> int:
        """RAM that streaming needs whatever is swapped or resident."""
        sizes = pool_sizes(
            self.system,
            self.block_sizes,
            num_update_parts=self.num_update_parts,
            gradient_slots=MIN_GRADIENT_SLOTS,
        )
        return sum(sizes.values())

    @cached_property
    def spare_gpu_bytes(self) -> int:
        """GPU memory beyond weights, gradients and one block's working set."""
        floor = _gpu_floor(
            self.system, self.shape, self.batch, self.num_micro_batches, self.workload.sequence
        )
        inputs = max(
            kind.input_bytes.at(self.batch, self.workload.sequence) for kind in self.shape.kinds
        )
        # What is on its way is counted with the choices that make it move.
        return max(0, self.budgets[Tier.GPU] - floor + self.moving_bytes_of(inputs))

    def moving_bytes_of(self, swapped_bytes: int) -> int:
        """GPU memory for swapped outputs of the block at work and its neighbour, a micro-batch."""
        return 2 * -(-swapped_bytes // self.num_micro_batches)

    def kind_of(self, block: BlockId) -> BlockShape:
        """Shape of a block."""
        return self.shape.kinds[self.shape.sequence_of_kinds[block]]

    def moving_bytes(self, plans: Sequence[BlockPlan]) -> int:
        """GPU memory for swapped outputs under these decisions."""
        costs = [self._costs(BlockId(number), plan) for number, plan in enumerate(plans)]
        return self.moving_bytes_of(max(cost.swapped_bytes for cost in costs))

    @cached_property
    def _known_costs(self) -> dict[tuple[int, BlockPlan], BlockCosts]:
        return {}

    def _costs(self, block: BlockId, plan: BlockPlan) -> BlockCosts:
        # Most blocks are of one kind with one decision; looking them up by the whole shape would
        # take longer than the sum it saves.
        key = (self.shape.sequence_of_kinds[block], plan)
        if key not in self._known_costs:
            self._known_costs[key] = block_costs(
                self.kind_of(block), plan, self.batch, self.workload.sequence, skips_unneeded=True
            )
        return self._known_costs[key]

    def _states_line(self, stored_bytes: int) -> LedgerLine:
        """Two slots per block, so that a sealed checkpoint is never overwritten; else one."""
        if 2 * stored_bytes <= self.budgets[Tier.SSD]:
            purpose, num_slots = "states in two slots", 2
        else:
            purpose = "states in one slot (two do not fit: a crash in a step loses the run)"
            num_slots = 1
        return LedgerLine(
            tier=Tier.SSD, purpose=purpose, nbytes=num_slots * stored_bytes, remedy="add a drive"
        )

    def ledger(self, plans: Sequence[BlockPlan], gradient_slots: int | None) -> Ledger:
        """Every line of the plan."""
        shape, num_gpus = self.shape, self.machine.num_gpus
        costs = [self._costs(BlockId(number), plan) for number, plan in enumerate(plans)]
        micro_batch = self.batch // self.num_micro_batches
        blocks = self.block_sizes
        sizes = pool_sizes(
            self.system,
            blocks,
            num_update_parts=self.num_update_parts,
            gradient_slots=gradient_slots,
        )
        working = max(
            working_bytes(kind, micro_batch, self.workload.sequence) for kind in shape.kinds
        )
        between = max(
            kind.input_bytes.at(self.batch, self.workload.sequence) for kind in shape.kinds
        )
        counts = [kind.num_parameters for kind in shape.blocks]
        trained = trained_parameters(shape)
        resident = sum(
            2 * own * (TensorKind.P16 in plan.residents)
            + 10 * changing * (TensorKind.OS32 in plan.residents)
            for own, changing, plan in zip(counts, trained, plans, strict=True)
        )
        on_ssd = max(cost.to_ssd_bytes for cost in costs) * num_gpus
        batch_remedy = "use a smaller batch or a shorter sequence"
        block_remedy = "use a GPU with more memory or a model with smaller blocks"
        ram_remedy = "give it more RAM"

        def line(
            tier: Tier, purpose: str, nbytes: int, remedy: str, *, is_constant: bool = False
        ) -> LedgerLine:
            return LedgerLine(
                tier=tier,
                purpose=purpose,
                nbytes=int(nbytes),
                remedy=remedy,
                is_constant=is_constant,
            )

        lines = [
            line(
                Tier.GPU,
                "weights in flight",
                self.system.num_weight_slots * blocks.largest_weights_bytes,
                block_remedy,
            ),
            line(
                Tier.GPU,
                "gradients",
                self.system.num_gradient_slots * blocks.largest_gradient_bytes,
                block_remedy,
            ),
            line(Tier.GPU, "one block's activations", working, batch_remedy, is_constant=True),
            line(
                Tier.GPU, "activations between two blocks", between, batch_remedy, is_constant=True
            ),
            line(Tier.GPU, "activations on their way", self.moving_bytes(plans), batch_remedy),
            line(
                Tier.GPU, "activations kept", sum(cost.kept_bytes for cost in costs), batch_remedy
            ),
            line(
                Tier.RAM,
                "weights read ahead",
                sizes["ring"] + sizes["held"] + sizes["fresh"],
                ram_remedy,
            ),
            line(Tier.RAM, "states in flight", sizes["states"], ram_remedy),
            line(Tier.RAM, "gradients waiting", sizes["waiting"], ram_remedy),
            line(
                Tier.RAM,
                "swapped activations",
                sum(cost.to_ram_bytes for cost in costs) * num_gpus,
                batch_remedy,
            ),
            line(Tier.RAM, "activations on their way", NUM_SPILL_SLOTS * on_ssd, batch_remedy),
            line(Tier.RAM, "resident states", resident, ram_remedy, is_constant=True),
            self._states_line(2 * sum(counts) + 10 * sum(trained) - resident),
            line(
                Tier.SSD,
                "swapped activations",
                sum(cost.to_ssd_bytes for cost in costs) * num_gpus,
                "add a drive",
            ),
            line(
                Tier.SSD,
                "waiting gradients",
                blocks.all_gradients_bytes * self.system.spills_gradients,
                "add a drive",
            ),
        ]
        return Ledger(lines=tuple(lines), budgets=self.budgets)
