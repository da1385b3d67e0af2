"""The plan of `lohan+`: the split state, RAM residency, updates under both passes, micro-batches.

Order of decisions: micro-batches until the GPU holds one, or more where that saves recomputing;
buffers; what waits for the norm; then what is kept and swapped (`our_search`); which updates run
under the next forward pass; at last the decisions of every block, whole outputs and whole blocks of
state at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count as count_from
from itertools import takewhile

from lohan.hardware.machine import Machine
from lohan.model.loss_head import in_chunks, loss_head, most_chunks
from lohan.model.shape import ModelShape
from lohan.plan.activations import best_point, spread_tiers
from lohan.plan.block_costs import costs_of_blocks
from lohan.plan.cost import step_load
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.policies.gpu_floor import GpuFloor, is_outside
from lohan.plan.policies.our_buffers import buffer_sets
from lohan.plan.policies.our_memory import OurMemory, micro_batch_counts
from lohan.plan.policies.our_search import Chosen, Search
from lohan.plan.residency import choose_residents, largest_residents
from lohan.plan.system import SPLIT_STATE, ActivationRule, System, UpdateTiming
from lohan.plan.workload import Workload
from lohan.vocabulary import Choice, PoolName, TensorKind, Tier

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
)

# More micro-batches must save at least this much: kernels on less are a little slower.
_WORTH_SPLITTING = 0.98
# And smaller pieces of state so much: drives are a little slower with them.
_WORTH_CUTTING = 0.95
# And residents that are not spread over the model so much: sums of traffic do not see the drives
# idle where blocks in a row have nothing to move.
_WORTH_CROWDING = 0.95


def plan_ours(machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
    """The plan of this project's engine, fitting or not: ask its ledger."""
    num_chunks = _loss_chunks(machine, shape, workload) if workload.should_chunk_loss else 1
    chunked = in_chunks(shape, workload.sequence, num_chunks)
    plan = _Planner(machine, chunked, workload).plan()
    return replace(plan, shape=shape, loss_chunks=num_chunks)


def _loss_chunks(machine: Machine, shape: ModelShape, workload: Workload) -> int:
    """The fewest chunks with which the head needs no more GPU memory than another block does: more
    would save nothing and make smaller products. 1 where its loss cannot be cut."""
    if isinstance(loss_head(shape), str):
        return 1
    batch, sequence = workload.batch_per_gpu(machine.num_gpus), workload.sequence

    def working_bytes(num_chunks: int) -> int:
        cut = in_chunks(shape, sequence, num_chunks)
        return GpuFloor.of(cut, batch, batch, sequence).working_bytes

    most = most_chunks(sequence)
    least = working_bytes(most)
    counts = takewhile(lambda count: count < most, (2**power for power in count_from(0)))
    return next((count for count in counts if working_bytes(count) <= least), most)


@dataclass(frozen=True)
class _Planner:
    machine: Machine
    shape: ModelShape
    workload: Workload

    @cached_property
    def search(self) -> Search:
        return Search(self.machine, self.shape, self.workload)

    def plan(self) -> Plan:
        best: tuple[_Decided, Plan] | None = None
        counts = micro_batch_counts(OURS, self.machine, self.shape, self.workload)
        for num_micro_batches, system in counts:
            way, plan = self._with_best_buffers(system, num_micro_batches)
            if best is None or (
                plan.ledger.fits and self._seconds(way) < _WORTH_SPLITTING * self._seconds(best[0])
            ):
                best = (way, plan)
            if not best[0].chosen.point.recompute_flops:
                # Smaller micro-batches leave more room on the GPU, and there is room enough.
                break
        assert best is not None, "there is always a number of micro-batches"
        return best[1]

    def _with_best_buffers(self, system: System, num_micro_batches: int) -> tuple["_Decided", Plan]:
        """The plan with the most generous buffers that fit, or smaller pieces of state where RAM
        serves better otherwise; the leanest where none fit."""
        best: tuple[_Decided, Plan] | None = None
        for buffers in buffer_sets(self.shape, self.workload):
            if (
                best is not None
                and best[1].ledger.spare(Tier.RAM) >= 0
                and (buffers.costs_overlap or not self._wants_ram(best))
            ):
                break
            found = self._best_way(
                OurMemory(
                    system=buffers.of(system),
                    machine=self.machine,
                    shape=self.shape,
                    workload=self.workload,
                    num_micro_batches=num_micro_batches,
                    buffers=buffers,
                )
            )
            if (
                best is None
                or best[1].ledger.spare(Tier.RAM) < 0
                or self._seconds(found[0]) < _WORTH_CUTTING * self._seconds(best[0])
            ):
                best = found
        assert best is not None, "there is always a set of buffers"
        return best

    def _wants_ram(self, way: tuple["_Decided", Plan]) -> bool:
        """Whether states in flight take a good part of RAM from what could stay in it."""
        memory, plan = way[0].memory, way[1]
        states = memory.pool_bytes(plan.gradient_slots)[PoolName.STATES]
        return states > (1 - _WORTH_CUTTING) * memory.budgets[Tier.RAM]

    def _best_way(self, memory: OurMemory) -> tuple["_Decided", Plan]:
        """The fastest plan with so many micro-batches, of those that need least where none fits."""
        if not self.workload.clips_gradients:
            way = self._without_clipping(memory)
            return way, self._plan_of(way)
        ways = [(way, self._plan_of(way)) for way in self._with_clipping(memory)]

        def rank(of: tuple[_Decided, Plan]) -> tuple[int, int, float]:
            # Where neither fits, the one that needs less RAM is what a user must make room for.
            short = of[1].ledger.shortages()
            return short.get(Tier.RAM, 0), short.get(Tier.SSD, 0), self._seconds(of[0])

        return min(ways, key=rank)

    def _seconds(self, way: "_Decided") -> float:
        return self.search.load(way.chosen, way.spare, way.memory.system).estimated_seconds

    def _plan_of(self, decided: "_Decided") -> Plan:
        blocks = self._decide(decided)
        return Plan(
            system=decided.memory.system,
            workload=self.workload,
            num_gpus=self.machine.num_gpus,
            shape=self.shape,
            num_micro_batches=decided.memory.num_micro_batches,
            blocks=tuple(blocks),
            ledger=decided.memory.ledger(blocks, decided.gradient_slots),
            num_update_parts=decided.memory.buffers.num_update_parts,
            gradient_slots=decided.gradient_slots,
        )

    def _without_clipping(self, memory: OurMemory) -> "_Decided":
        least = memory.buffers.gradient_slots
        spare = memory.spare_ram_bytes(least)
        share = self._deferred_share(self.search.choose(memory, spare), memory, spare)
        deferred = self._deferred_blocks(share, memory, spare)
        if not deferred:
            # No weights come straight from an update.
            memory = replace(memory, system=replace(memory.system, num_fresh_slots=0))
        # Gradients of deferred updates wait in RAM for the next forward pass.
        largest = max(1, memory.block_sizes.largest_waiting_bytes)
        waiting = self.workload.gradient_bytes * sum(self.search.trained[own] for own in deferred)
        slots = min(len(self.search.blocks), least + -(-waiting // largest))
        spare = memory.spare_ram_bytes(slots)
        return _Decided(
            memory=memory,
            spare=spare,
            chosen=self.search.choose(memory, spare),
            deferred=frozenset(deferred),
            gradient_slots=slots,
        )

    def _with_clipping(self, memory: OurMemory) -> list["_Decided"]:
        """All updates wait for the norm: their gradients in RAM, or on SSD."""
        # None takes its weights from the backward pass.
        system = replace(memory.system, num_held_slots=0)
        waiting = replace(memory, system=system)
        spilling = replace(memory, system=replace(system, spills_gradients=True))
        return [
            self._all_deferred(waiting, None),
            self._all_deferred(spilling, memory.buffers.gradient_slots),
        ]

    def _all_deferred(self, memory: OurMemory, gradient_slots: int | None) -> "_Decided":
        spare = memory.spare_ram_bytes(gradient_slots)
        return _Decided(
            memory=memory,
            spare=spare,
            chosen=self.search.choose(memory, spare),
            deferred=frozenset(range(len(self.search.blocks))),
            gradient_slots=gradient_slots,
        )

    # Which updates are deferred --------------------------------------------------------------

    def _deferred_share(self, chosen: Chosen, memory: OurMemory, spare: int) -> float:
        """Share of updates left to the next forward pass, so that the drives are as busy in it
        as in the backward pass, each in proportion to its length."""
        point, search = chosen.point, self.search
        traffic = search.traffic(chosen, search.fill(chosen, spare, memory.system), False)
        machine = self.machine
        read, write = machine.ssd_read_bytes_per_second, machine.ssd_write_bytes_per_second
        weights = traffic.weight_read_bytes / read
        spill_out, spill_in = traffic.spilled_bytes / write, traffic.spilled_bytes / read
        update = traffic.state_read_bytes / read + traffic.state_written_bytes / write
        # No gradient comes before the head and one more block have gone backward.
        head = search.blocks[-1].backward_flops.at(search.batch, self.workload.sequence)
        one = (search.backward_flops + point.recompute_flops) / len(search.blocks)
        forward_share = (search.forward_flops + head + one) / max(
            1, self.search.forward_flops + self.search.backward_flops + point.recompute_flops
        )
        if update <= self.search.num_trained / machine.cpu_update_parameters_per_second:
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
        for block, trained in enumerate(self.search.trained):
            due += share * trained
            if trained and due >= trained / 2 and block not in self._tied_blocks:
                deferred.add(block)
                due -= trained
        return deferred

    @cached_property
    def _tied_blocks(self) -> set[int]:
        return {block for owner, other, _ in self.shape.tied for block in (owner, other)}

    # Decisions per block ---------------------------------------------------------------------

    def _decide(self, decided: "_Decided") -> list[BlockPlan]:
        chosen, spare = decided.chosen, decided.spare
        in_ram = self.search.fill(chosen, spare, decided.memory.system).activation_bytes
        if in_ram == chosen.swapped_bytes * self.machine.num_gpus:
            # All of it: whole outputs may need a little more than the search's shares.
            in_ram = spare
        plans = spread_tiers(
            chosen.orders,
            chosen.inputs,
            chosen.point.num_items,
            (
                (Choice.KEEP, chosen.kept_bytes),
                (Choice.SWAP_TO_RAM, in_ram // self.machine.num_gpus),
            ),
        )
        last = len(plans) - 1
        for number in range(last - chosen.num_kept, last):
            saved = [op.index for op in self.search.blocks[number].operators if op.is_saved]
            plans[number] = BlockPlan(
                input_choice=Choice.KEEP, choices=tuple((index, Choice.KEEP) for index in saved)
            )
        for number in range(len(plans)):
            if is_outside(self.shape, number) and number:
                plans[number] = BlockPlan(input_choice=Choice.KEEP)
        residents = self._residents(decided, plans)
        return [
            replace(plan, residents=resident, defers_update=number in decided.deferred)
            for number, (plan, resident) in enumerate(zip(plans, residents, strict=True))
        ]

    def _residents(
        self, decided: "_Decided", plans: Sequence[BlockPlan]
    ) -> list[frozenset[TensorKind]]:
        """States in RAM once whole outputs have found their place: the search dealt in shares.

        Weights first, as the search had it, or the others first, or the largest blocks, where whole
        blocks or the norm make that better.
        """
        search, num_gpus = self.search, self.machine.num_gpus
        costs = costs_of_blocks(self.shape, plans, search.batch, self.workload.sequence, True)
        in_ram = sum(cost.to_ram_bytes for cost in costs) * num_gpus
        num_spill_slots = decided.memory.system.num_spill_slots
        buffers = num_spill_slots * max(cost.to_ssd_bytes for cost in costs) * num_gpus
        left = max(0, decided.spare - in_ram - buffers)
        weights_first = search.fill_ram(left, 0)
        states = min(left, 10 * search.num_trained)
        states_first = replace(weights_first, weights_bytes=left - states, states_bytes=states)
        counts = search.stored
        found = [
            choose_residents(weights_first, counts, search.trained, weights_first=True),
            choose_residents(states_first, counts, search.trained, weights_first=False),
        ]

        def resident(
            kind: TensorKind, sizes: Sequence[int], residents: list[frozenset[TensorKind]]
        ) -> int:
            return sum(n for n, kinds in zip(sizes, residents, strict=True) if kind in kinds)

        def seconds(residents: list[frozenset[TensorKind]]) -> float:
            filled = replace(
                search.fill(decided.chosen, decided.spare, decided.memory.system),
                weights_bytes=2 * resident(TensorKind.P16, counts, residents),
                states_bytes=10 * resident(TensorKind.OS32, search.trained, residents),
            )
            spills = decided.memory.system.spills_gradients
            traffic = search.traffic(decided.chosen, filled, spills)
            clips = self.workload.clips_gradients
            return step_load(self.machine, traffic, clips=clips).estimated_seconds

        spread = best_point(found, seconds)
        largest = largest_residents(left, counts, search.trained)
        return largest if seconds(largest) < _WORTH_CROWDING * seconds(spread) else spread


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decided:
    """What is decided before the blocks' own decisions are written down."""

    memory: OurMemory
    spare: int
    """RAM for residents and activations."""
    chosen: Chosen
    deferred: frozenset[int]
    gradient_slots: int | None
