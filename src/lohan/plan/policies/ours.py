"""The plan of `lohan+`: the split state, RAM residency, updates under both passes, micro-batches.

Order of decisions: micro-batches until the GPU holds one; buffers; what waits for the norm; then
the point on the swap list with the shortest predicted step, each point filling the RAM that is
left by benefit per byte; at last which updates run under the next forward pass.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from lohan.hardware.machine import Machine
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan.activations import SwapPoint, assign_tiers, best_point, swap_points
from lohan.plan.cost import StepLoad, Traffic, step_load
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.policies.our_memory import OurMemory, minimum_micro_batches
from lohan.plan.pools import NUM_SPILL_SLOTS
from lohan.plan.residency import Residency, choose_residents, fill_ram
from lohan.plan.swap_order import SwapStep, swap_order
from lohan.plan.system import SPLIT_STATE, ActivationRule, System, UpdateTiming
from lohan.plan.workload import Workload
from lohan.vocabulary import BlockId, Choice, Tier

OURS = System(
    name="lohan+",
    summary="this project: split state, RAM residency, updates under backward and next forward",
    state=SPLIT_STATE,
    home=Tier.SSD,
    update_timing=UpdateTiming.UNDER_NEXT_FORWARD,
    activations=ActivationRule.HOLISTIC,
    num_weight_slots=2,
    num_state_slots=4,
    has_barrier=False,
    skips_unneeded=True,
    uses_residency=True,
    splits_batches=True,
)

# Parameters of one streamed piece of state: large enough for the drives, small enough for RAM.
PART_PARAMETERS = 400_000_000


def plan_ours(machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
    """The plan of this project's engine, fitting or not: ask its ledger."""
    return _Planner(machine, shape, workload).plan()


@dataclass(frozen=True)
class _Planner:
    machine: Machine
    shape: ModelShape
    workload: Workload

    @cached_property
    def blocks(self) -> list[BlockShape]:
        return [self.shape.kinds[kind] for kind in self.shape.sequence_of_kinds]

    @cached_property
    def batch(self) -> int:
        return self.workload.batch_per_gpu(self.machine.num_gpus)

    @cached_property
    def num_update_parts(self) -> int:
        largest = max(block.num_parameters for block in self.shape.kinds)
        return max(1, -(-largest // PART_PARAMETERS))

    def _flops(self, way: str) -> int:
        per_kind = [
            getattr(kind, way).at(self.batch, self.workload.sequence) for kind in self.shape.kinds
        ]
        return sum(per_kind[kind] for kind in self.shape.sequence_of_kinds)

    @cached_property
    def forward_flops(self) -> int:
        return self._flops("forward_flops")

    @cached_property
    def backward_flops(self) -> int:
        return self._flops("backward_flops")

    @cached_property
    def orders(self) -> list[tuple[SwapStep, ...]]:
        inner = [
            swap_order(block, self.batch, self.workload.sequence, True)
            for block in self.blocks[1:-1]
        ]
        return [(), *inner, ()]

    @cached_property
    def inputs(self) -> list[int]:
        sizes = [block.input_bytes.at(self.batch, self.workload.sequence) for block in self.blocks]
        # The head's input is used at once; it never leaves the GPU.
        return [*sizes[:-1], 0]

    def plan(self) -> Plan:
        num_micro_batches, system = minimum_micro_batches(
            OURS, self.machine, self.shape, self.batch, self.workload.sequence
        )
        memory = OurMemory(
            system=system,
            machine=self.machine,
            shape=self.shape,
            workload=self.workload,
            num_micro_batches=num_micro_batches,
            num_update_parts=self.num_update_parts,
        )
        spare = memory.budgets[Tier.RAM] - memory.buffer_bytes
        waiting = self.shape.num_parameters * 2
        if self.workload.clips_gradients:
            if waiting > 0.6 * spare:
                system = replace(system, spills_gradients=True)
                memory = replace(memory, system=system)
                spare = memory.budgets[Tier.RAM] - memory.buffer_bytes
            else:
                spare -= waiting
        point = self._choose_point(memory, max(0, spare), system)
        deferred = 1.0 if self.workload.clips_gradients else self._deferred_share(point, spare)
        # Gradients of deferred updates wait in RAM: at most half of what is left goes to them.
        most = max(0, spare) / 2 / memory.largest_weights_bytes / len(self.blocks)
        if not self.workload.clips_gradients:
            deferred = min(deferred, most)
        gradient_slots = None
        if not self.workload.clips_gradients:
            gradient_slots = min(len(self.blocks), 4 + round(deferred * len(self.blocks)))
            spare -= max(0, gradient_slots - 4) * memory.largest_weights_bytes
        elif system.spills_gradients:
            gradient_slots = 4
        blocks = self._decide(point, max(0, spare), deferred, memory)
        return Plan(
            system=system,
            workload=self.workload,
            num_gpus=self.machine.num_gpus,
            shape=self.shape,
            num_micro_batches=num_micro_batches,
            blocks=tuple(blocks),
            ledger=memory.ledger(blocks, gradient_slots),
            num_update_parts=self.num_update_parts,
            gradient_slots=gradient_slots,
        )

    # The swap point --------------------------------------------------------------------------

    def _rerun_flops(self) -> int:
        return sum(step.saved_flops for order in self.orders for step in order)

    def _choose_point(self, memory: OurMemory, spare: int, system: System) -> SwapPoint:
        points = swap_points(self.orders, self.inputs, self._rerun_flops())
        room = memory.spare_gpu_bytes * memory.num_micro_batches
        fitting = [
            point for point in points if point.num_items == 0 or point.largest_block_bytes <= room
        ]
        return best_point(
            fitting,
            lambda point: self.load(point, spare, system.spills_gradients).estimated_seconds,
        )

    def _fill(self, point: SwapPoint, spare: int) -> Residency:
        """RAM shared out when a point is chosen; what spills needs buffers on its way."""
        swapped = point.swapped_bytes * self.machine.num_gpus
        num_parameters = self.shape.num_parameters
        filled = fill_ram(spare, num_parameters=num_parameters, swapped_bytes=swapped)
        if filled.activation_bytes < swapped:
            buffers = NUM_SPILL_SLOTS * point.largest_block_bytes * self.machine.num_gpus
            filled = fill_ram(
                max(0, spare - buffers), num_parameters=num_parameters, swapped_bytes=swapped
            )
        return filled

    def load(self, point: SwapPoint, spare: int, spills_gradients: bool) -> StepLoad:
        """Busy seconds per resource when a point is chosen and RAM is filled by benefit."""
        filled = self._fill(point, spare)
        return step_load(self.machine, self._traffic(point, filled, spills_gradients))

    def _traffic(self, point: SwapPoint, filled: Residency, spills_gradients: bool) -> Traffic:
        num_parameters, num_gpus = self.shape.num_parameters, self.machine.num_gpus
        weights_on_ssd = 2 * num_parameters - filled.weights_bytes
        states_on_ssd = 10 * num_parameters - filled.states_bytes
        spilled_gradients = 2 * num_parameters if spills_gradients else 0
        return Traffic(
            forward_flops=self.forward_flops,
            backward_flops=self.backward_flops,
            recompute_flops=point.recompute_flops,
            num_parameters=num_parameters,
            swapped_bytes=point.swapped_bytes * num_gpus,
            spilled_bytes=point.swapped_bytes * num_gpus - filled.activation_bytes,
            state_read_bytes=states_on_ssd + spilled_gradients,
            state_written_bytes=states_on_ssd + weights_on_ssd + spilled_gradients,
            weight_read_bytes=weights_on_ssd,
            weight_copy_bytes=2 * num_parameters * num_gpus,
        )

    def _deferred_share(self, point: SwapPoint, spare: int) -> float:
        """Share of updates left to the next forward pass, so that the drives are as busy in it
        as in the backward pass, each in proportion to its length."""
        filled = self._fill(point, spare)
        traffic = self._traffic(point, filled, False)
        read, write = (
            self.machine.ssd_read_bytes_per_second,
            self.machine.ssd_write_bytes_per_second,
        )
        weights = traffic.weight_read_bytes / read
        spill_out, spill_in = traffic.spilled_bytes / write, traffic.spilled_bytes / read
        update = traffic.state_read_bytes / read + traffic.state_written_bytes / write
        forward_share = self.forward_flops / (
            self.forward_flops + self.backward_flops + point.recompute_flops
        )
        if update <= self.shape.num_parameters / self.machine.cpu_update_parameters_per_second:
            # The CPU, not the drives, is what updates keep busy.
            return forward_share
        total = 2 * weights + spill_out + spill_in + update
        # Forward: weights of blocks not deferred, spills, deferred updates with their weights.
        room = forward_share * total - weights - spill_out
        return min(1.0, max(0.0, room / update))

    # Decisions per block ---------------------------------------------------------------------

    def _decide(
        self, point: SwapPoint, spare: int, deferred: float, memory: OurMemory
    ) -> list[BlockPlan]:
        num_gpus = self.machine.num_gpus
        filled = self._fill(point, spare)
        plans = assign_tiers(
            self.orders,
            self.inputs,
            point.num_items,
            filled.activation_bytes,
            bytes_factor=num_gpus,
        )
        plans[-1] = replace(plans[-1], input_choice=Choice.KEEP)
        plans = self._keep_last(plans, memory)
        residents = choose_residents(
            filled, [block.num_parameters for block in self.blocks], self.shape.tied
        )
        share, num_deferred = 0.0, 0
        decided = []
        for number, (plan, resident) in enumerate(zip(plans, residents, strict=True)):
            share += deferred
            # Spread evenly: the drives then have something to do all along both passes.
            defers = round(share) > num_deferred and number not in self._tied_blocks
            if round(share) > num_deferred:
                num_deferred += 1
            decided.append(
                replace(plan, residents=resident, defers_update=defers or deferred == 1.0)
            )
        return decided

    @cached_property
    def _tied_blocks(self) -> set[int]:
        return {block for owner, other, _ in self.shape.tied for block in (owner, other)}

    def _keep_last(self, plans: list[BlockPlan], memory: OurMemory) -> list[BlockPlan]:
        """Keep activations of the last blocks on the GPU where its memory allows."""
        room = memory.spare_gpu_bytes - memory.moving_bytes(plans)
        kept = list(plans)
        for number in range(len(plans) - 2, 0, -1):
            plan, shape = kept[number], memory.kind_of(BlockId(number))
            saved = [op.index for op in shape.operators if op.is_saved]
            nbytes = self.inputs[number] + shape.saved_bytes.at(self.batch, self.workload.sequence)
            if nbytes > room:
                break
            room -= nbytes
            kept[number] = replace(
                plan,
                input_choice=Choice.KEEP,
                choices=tuple((index, Choice.KEEP) for index in saved),
            )
        return kept
