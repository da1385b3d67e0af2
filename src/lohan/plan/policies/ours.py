"""The plan of `lohan+`: the split state, RAM residency, updates under both passes, micro-batches.

Order of decisions: micro-batches until the GPU holds one; buffers; what waits for the norm; then
the point on the swap list with the shortest predicted step, each point filling the RAM that is
left by benefit per byte; at last which updates run under the next forward pass.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from lohan.hardware.machine import Machine
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan.activations import SwapPoint, assign_tiers, best_point, swap_points
from lohan.plan.cost import StepLoad, Traffic, step_load
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.policies.our_memory import MIN_GRADIENT_SLOTS, OurMemory, minimum_micro_batches
from lohan.plan.pools import NUM_SPILL_SLOTS, trained_parameters
from lohan.plan.residency import Residency, choose_residents, fill_ram
from lohan.plan.swap_order import SwapStep, swap_order
from lohan.plan.system import SPLIT_STATE, ActivationRule, System, UpdateTiming
from lohan.plan.workload import Workload
from lohan.vocabulary import Choice, Tier

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

# Parameters of one streamed piece of state: large enough for the drives, small enough for RAM,
# and not so many pieces that the list of tasks gets long.
PART_PARAMETERS = 100_000_000
MAX_PARTS = 6


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
        return min(MAX_PARTS, max(1, -(-max(self.trained) // PART_PARAMETERS)))

    @cached_property
    def trained(self) -> list[int]:
        return trained_parameters(self.shape)

    @cached_property
    def num_trained(self) -> int:
        return sum(self.trained)

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
        return [(), *inner, ()][: len(self.blocks)]

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
        if self.workload.clips_gradients:
            decided = self._with_clipping(memory)
        else:
            decided = self._without_clipping(memory)
        system = decided.memory.system
        blocks = self._decide(decided.chosen, decided.spare, decided.deferred)
        return Plan(
            system=system,
            workload=self.workload,
            num_gpus=self.machine.num_gpus,
            shape=self.shape,
            num_micro_batches=num_micro_batches,
            blocks=tuple(blocks),
            ledger=decided.memory.ledger(blocks, decided.gradient_slots),
            num_update_parts=self.num_update_parts,
            gradient_slots=decided.gradient_slots,
        )

    def _without_clipping(self, memory: OurMemory) -> "_Decided":
        spare = max(0, memory.budgets[Tier.RAM] - memory.buffer_bytes)
        share = self._deferred_share(self._choose(memory, spare), spare)
        deferred = self._deferred_blocks(share, memory, spare)
        # Gradients of deferred updates wait in RAM for the next forward pass.
        largest = max(1, memory.block_sizes.largest_gradient_bytes)
        waiting = 2 * sum(self.trained[block] for block in deferred)
        slots = min(len(self.blocks), MIN_GRADIENT_SLOTS + -(-waiting // largest))
        spare = max(0, spare - max(0, slots - MIN_GRADIENT_SLOTS) * largest)
        return _Decided(
            memory=memory,
            spare=spare,
            chosen=self._choose(memory, spare),
            deferred=frozenset(deferred),
            gradient_slots=slots,
        )

    def _with_clipping(self, memory: OurMemory) -> "_Decided":
        """All updates wait for the norm: their gradients in RAM, or on SSD if that is faster."""
        waiting = memory.block_sizes.all_gradients_bytes
        spilling = replace(memory, system=replace(memory.system, spills_gradients=True))
        ways: list[tuple[OurMemory, int, int | None]] = [
            (memory, memory.budgets[Tier.RAM] - memory.buffer_bytes - waiting, None),
            (
                spilling,
                spilling.budgets[Tier.RAM] - spilling.buffer_bytes,
                MIN_GRADIENT_SLOTS,
            ),
        ]
        best: tuple[tuple[bool, float], _Decided] | None = None
        for way, spare, gradient_slots in ways:
            chosen = self._choose(way, max(0, spare))
            seconds = self.load(chosen.point, max(0, spare), way.system).estimated_seconds
            if best is None or (spare < 0, seconds) < best[0]:
                decided = _Decided(
                    memory=way,
                    spare=max(0, spare),
                    chosen=chosen,
                    deferred=frozenset(range(len(self.blocks))),
                    gradient_slots=gradient_slots,
                )
                best = (spare < 0, seconds), decided
        assert best is not None
        return best[1]

    # What is kept and swapped ----------------------------------------------------------------

    def _choose(self, memory: OurMemory, spare: int) -> "_Chosen":
        """How many last blocks are kept on the GPU, and how much the others swap."""
        most = self._most_kept(memory, 0)
        best: tuple[float, _Chosen] | None = None
        for num_kept in sorted({most * quarter // 4 for quarter in range(5)}):
            swapping = len(self.blocks) - 1 - num_kept
            orders = [*self.orders[:swapping], *([()] * (num_kept + 1))]
            inputs = [*self.inputs[:swapping], *([0] * (num_kept + 1))]
            left = sum(step.saved_flops for order in orders for step in order)
            points = swap_points(orders, inputs, left)
            fitting = [
                point
                for point in points
                if (num_kept == 0 and point.num_items == 0)
                or self._most_kept(memory, point.largest_block_bytes) >= num_kept
            ]
            if not fitting:
                continue
            point = best_point(
                fitting, lambda point: self.load(point, spare, memory.system).estimated_seconds
            )
            seconds = self.load(point, spare, memory.system).estimated_seconds
            if best is None or seconds < best[0] * (1 - 1e-9):
                best = (
                    seconds,
                    _Chosen(
                        orders=tuple(orders), inputs=tuple(inputs), point=point, num_kept=num_kept
                    ),
                )
        assert best is not None
        return best[1]

    def _most_kept(self, memory: OurMemory, largest_block_bytes: int) -> int:
        """Last blocks whose activations the GPU can keep beside what moves; -1: it cannot move."""
        room = memory.spare_gpu_bytes - memory.moving_bytes_of(largest_block_bytes)
        if room < 0:
            return -1
        return bisect_right(self._kept_bytes, room) - 1

    @cached_property
    def _kept_bytes(self) -> list[int]:
        """Bytes of the activations of the last 0, 1, 2, ... inner blocks."""
        sizes = [
            kind.input_bytes.at(self.batch, self.workload.sequence)
            + sum(
                op.output_bytes.at(self.batch, self.workload.sequence)
                for op in kind.operators
                if op.is_saved
            )
            for kind in self.shape.kinds
        ]
        inner = [sizes[kind] for kind in self.shape.sequence_of_kinds[1:-1]]
        return [0, *accumulate(reversed(inner))]

    def _fill(self, point: SwapPoint, spare: int) -> Residency:
        """RAM shared out when a point is chosen; what spills needs buffers on its way."""
        swapped = point.swapped_bytes * self.machine.num_gpus

        def filled(spare_bytes: int) -> Residency:
            return fill_ram(
                max(0, spare_bytes),
                num_parameters=self.shape.num_parameters,
                num_trained=self.num_trained,
                swapped_bytes=swapped,
            )

        if filled(spare).activation_bytes < swapped:
            return filled(
                spare - NUM_SPILL_SLOTS * point.largest_block_bytes * self.machine.num_gpus
            )
        return filled(spare)

    def load(self, point: SwapPoint, spare: int, system: System) -> StepLoad:
        """Busy seconds per resource when a point is chosen and RAM is filled by benefit."""
        traffic = self._traffic(point, self._fill(point, spare), system.spills_gradients)
        return step_load(self.machine, traffic, clips=self.workload.clips_gradients)

    def _traffic(self, point: SwapPoint, filled: Residency, spills_gradients: bool) -> Traffic:
        num_parameters, num_gpus = self.shape.num_parameters, self.machine.num_gpus
        weights_on_ssd = 2 * num_parameters - filled.weights_bytes
        states_on_ssd = 10 * self.num_trained - filled.states_bytes
        # Frozen weights are read but never written.
        weights_written = weights_on_ssd * self.num_trained / max(1, num_parameters)
        return Traffic(
            forward_flops=self.forward_flops,
            backward_flops=self.backward_flops,
            recompute_flops=point.recompute_flops,
            num_parameters=self.num_trained,
            swapped_bytes=point.swapped_bytes * num_gpus,
            spilled_bytes=point.swapped_bytes * num_gpus - filled.activation_bytes,
            state_read_bytes=states_on_ssd,
            state_written_bytes=states_on_ssd + weights_written,
            weight_read_bytes=weights_on_ssd,
            weight_copy_bytes=2 * num_parameters * num_gpus,
            gradient_spill_bytes=2 * self.num_trained if spills_gradients else 0,
        )

    # Which updates are deferred --------------------------------------------------------------

    def _deferred_share(self, chosen: "_Chosen", spare: int) -> float:
        """Share of updates left to the next forward pass, so that the drives are as busy in it
        as in the backward pass, each in proportion to its length."""
        point = chosen.point
        traffic = self._traffic(point, self._fill(point, spare), False)
        machine = self.machine
        read, write = machine.ssd_read_bytes_per_second, machine.ssd_write_bytes_per_second
        weights = traffic.weight_read_bytes / read
        spill_out, spill_in = traffic.spilled_bytes / write, traffic.spilled_bytes / read
        update = traffic.state_read_bytes / read + traffic.state_written_bytes / write
        # No gradient comes before the head and one more block have gone backward.
        first = self.blocks[-1].backward_flops.at(self.batch, self.workload.sequence) + (
            self.backward_flops + point.recompute_flops
        ) / len(self.blocks)
        forward_share = (self.forward_flops + first) / max(
            1, self.forward_flops + self.backward_flops + point.recompute_flops
        )
        if update <= self.num_trained / machine.cpu_update_parameters_per_second:
            # The CPU, not the drives, is what updates keep busy.
            return min(1.0, forward_share)
        total = 2 * weights + spill_out + spill_in + update
        # Forward: weights of blocks not deferred, spills, deferred updates with their weights.
        room = forward_share * total - weights - spill_out
        return min(1.0, max(0.0, room / update))

    def _deferred_blocks(self, share: float, memory: OurMemory, spare: int) -> set[int]:
        """Blocks whose updates are deferred: spread evenly over the model by parameters, so that
        the drives have something to do all along both passes."""
        # Their gradients wait in RAM: at most half of what is left goes to them.
        share = min(share, spare / 2 / max(1, memory.block_sizes.all_gradients_bytes))
        deferred: set[int] = set()
        due = 0.0
        for block, trained in enumerate(self.trained):
            due += share * trained
            if trained and due >= trained / 2 and block not in self._tied_blocks:
                deferred.add(block)
                due -= trained
        return deferred

    @cached_property
    def _tied_blocks(self) -> set[int]:
        return {block for owner, other, _ in self.shape.tied for block in (owner, other)}

    # Decisions per block ---------------------------------------------------------------------

    def _decide(self, chosen: "_Chosen", spare: int, deferred: frozenset[int]) -> list[BlockPlan]:
        filled = self._fill(chosen.point, spare)
        plans = assign_tiers(
            chosen.orders,
            chosen.inputs,
            chosen.point.num_items,
            filled.activation_bytes,
            bytes_factor=self.machine.num_gpus,
        )
        plans[-1] = replace(plans[-1], input_choice=Choice.KEEP)
        last = len(plans) - 1
        for number in range(last - chosen.num_kept, last):
            saved = [op.index for op in self.blocks[number].operators if op.is_saved]
            plans[number] = BlockPlan(
                input_choice=Choice.KEEP, choices=tuple((index, Choice.KEEP) for index in saved)
            )
        residents = choose_residents(
            filled,
            [block.num_parameters for block in self.blocks],
            self.trained,
        )
        return [
            replace(plan, residents=resident, defers_update=number in deferred)
            for number, (plan, resident) in enumerate(zip(plans, residents, strict=True))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """What is kept and swapped: swap lists of the blocks that swap, and how far down they go."""

    orders: tuple[tuple[SwapStep, ...], ...]
    inputs: tuple[int, ...]
    point: SwapPoint
    num_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    """What is decided before the blocks' own decisions are written down."""

    memory: OurMemory
    spare: int
    """RAM for residents and activations."""
    chosen: _Chosen
    deferred: frozenset[int]
    gradient_slots: int | None
