"""From a model's shape and the sizes of a batch to a plan the engine can run within its budgets.

Owns the machine as the budgets leave it, and the check that all memory of the schedule fits; what
would have fitted is part of a refusal. Decides nothing itself: a policy does. Called by the engine
before the first step and when batches outgrow the plan.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lohan.drive.activations.store import BlockChoices
from lohan.engine.planning.budgets import Budgets, least_bytes
from lohan.engine.planning.plan_memory import gpu_rounding_bytes, needed_ram_bytes, rounding_bytes
from lohan.engine.planning.traced_model import BatchSizes
from lohan.engine.planning.write_limit import (
    WRITE_PRICES,
    Candidate,
    fastest_within,
    with_write_price,
)
from lohan.errors import ConfigError, DoesNotFit
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan import make_plan
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.policies import Policy, system_policy
from lohan.plan.policies.our_memory import GPU_SHARE, RAM_SHARE
from lohan.plan.pools import part_parameters, update_parts, updated_parameters
from lohan.plan.system import PLAIN_STATE, SPLIT_STATE
from lohan.plan.workload import Workload
from lohan.simulate.choose import best_of, candidates
from lohan.simulate.quick import quick_step
from lohan.store import (
    ComputeFormat,
    MasterFormat,
    StateLayout,
    parts_of_kinds,
    resident_bytes,
)
from lohan.units import format_bytes
from lohan.vocabulary import BlockId, Choice, Tier

_GPU_SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)
"""Shares of main memory given to the GPU tier, tried where both are one memory."""
_MOST_ATTEMPTS = 8
_CLEARLY_FASTER = 0.9
"""Medians of a few steps vary by less than a tenth on a machine that is left alone."""
_AMPLE_TIMES = 8
"""So many times the RAM of the leanest plan, and RAM is not what lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A plan and what the engine derives from it."""

    plan: Plan
    machine: Machine
    sizes: BatchSizes
    choices: Mapping[BlockId, BlockChoices]
    num_pieces: Mapping[BlockId, int]
    seconds: float
    """What a step takes, as simulated when it was planned."""
    ssd_bytes: int
    """What a step moves to and from SSD."""
    states_bytes: int = 0
    """What all states take on SSD, as they are laid out; of a plan that is told of at attaching."""
    swap_bytes: int = 0
    """Likewise, what is there besides them."""


def plan_run(
    shape: ModelShape,
    sizes: BatchSizes,
    *,
    policy: str | Policy,
    machine: Machine,
    budgets: Budgets,
    layout: StateLayout,
    clips_gradients: bool,
    shares_ram: bool,
    fixed_residents: Sequence[BlockPlan] | None = None,
    num_ranks: int = 1,
    reduction_groups: int = 1,
    should_chunk_loss: bool = False,
) -> PlannedRun:
    """Plan a run within the budgets.

    Args:
        layout: of what this rank stores.
        fixed_residents: what lives in RAM already and stays there.

    Raises:
        DoesNotFit: no plan of this policy stays within them, that of writes included.
    """
    workload = Workload(
        batch=sizes.num_micro_batches * sizes.micro_batch,
        sequence=max(1, sizes.sequence),
        clips_gradients=clips_gradients,
        num_micro_batches=sizes.num_micro_batches,
        num_ranks=num_ranks,
        reduction_groups=reduction_groups,
        should_chunk_loss=should_chunk_loss,
    )
    held = 0
    if fixed_residents is not None:
        # What lives in RAM stays there: the rest of RAM is planned anew.
        held = resident_bytes(
            layout, parts_of_kinds(layout, [block.residents for block in fixed_residents])
        )
    planning = _Planning(
        policy=policy,
        machine=machine,
        shape=shape,
        workload=workload,
        layout=layout,
        shares_ram=shares_ram,
        held_bytes=held,
    )
    # A function that is a policy may say something else the next time.
    find = _candidates.__wrapped__ if callable(policy) else _candidates
    judged = find(planning, budgets, should_search=fixed_residents is None)
    if not judged:
        raise planning.refusal(budgets, sizes)
    if budgets.writes is None:
        best = best_of(judged)
    else:
        # A run that is going on ends by what it has written, not by what is predicted.
        best = fastest_within(judged, budgets.writes, is_binding=fixed_residents is None)
    seconds, plan, used = best.step.step_seconds, best.plan, best.machine
    if fixed_residents is not None:
        plan = replace(
            plan,
            blocks=tuple(
                replace(block, residents=before.residents)
                for block, before in zip(plan.blocks, fixed_residents, strict=True)
            ),
        )
    return PlannedRun(
        plan=plan,
        machine=used,
        sizes=sizes,
        choices=choices_of(plan, shares_ram=shares_ram),
        num_pieces=pieces_of(plan),
        seconds=seconds_of(plan, used) if fixed_residents is not None else seconds,
        ssd_bytes=best.step.read_bytes + best.step.written_bytes,
    )


@functools.lru_cache(maxsize=4)
def _candidates(
    planning: "_Planning", budgets: Budgets, *, should_search: bool
) -> tuple[Candidate, ...]:
    """Plans within the budgets, judged; remembered, as a run asks for its first plan when it is
    attached, when that is shown, and when it begins."""
    judged = _judged(planning.plans(budgets))
    if judged and should_search:
        fastest = min(judged, key=lambda one: one.step.step_seconds)
        judged += planning.others(fastest, budgets)
    return tuple(judged)


def _judged(found: Sequence[tuple[Plan, Machine]]) -> list[Candidate]:
    return [Candidate(plan=plan, machine=used, step=quick_step(plan, used)) for plan, used in found]


def seconds_of(plan: Plan, machine: Machine) -> float:
    """What a step of a plan takes, as simulated."""
    return quick_step(plan, machine).step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planning:
    """What is asked of a policy, whatever the budgets."""

    policy: str | Policy
    machine: Machine
    shape: ModelShape
    workload: Workload
    layout: StateLayout
    shares_ram: bool
    held_bytes: int
    """RAM of what is resident already."""

    def plans(self, budgets: Budgets) -> list[tuple[Plan, Machine]]:
        """Plans within the budgets, each with the machine as they leave it.

        Where GPU and RAM are one memory there are several ways to divide it.
        """
        found = self._plans_on(self._machines(budgets), budgets)
        if not found and self._is_open(budgets):
            found = self._plans_on([self._tight_machine(budgets)], budgets)
        return found

    def _plans_on(
        self, machines: Sequence[Machine], budgets: Budgets
    ) -> list[tuple[Plan, Machine]]:
        is_limited = budgets.writes is not None and not callable(self.policy)
        found = []
        for used in machines:
            for price in WRITE_PRICES if is_limited else WRITE_PRICES[:1]:
                with contextlib.suppress(DoesNotFit):
                    found.append((self._plan_on(with_write_price(used, price), budgets), used))
        return found

    def others(self, best: Candidate, budgets: Budgets) -> list[Candidate]:
        """Plans for less within the budgets, as candidates beside the best for the machine."""
        if callable(self.policy) or not system_policy(self.policy).system.uses_residency:
            return []

        def plan_for(machine: Machine, workload: Workload) -> Plan | None:
            with contextlib.suppress(DoesNotFit):
                return replace(self, workload=workload)._plan_on(machine, budgets)
            return None

        def judge(plan: Plan) -> Candidate:
            return best if plan is best.plan else _judged([(plan, best.machine)])[0]

        return candidates(best.plan, best.machine, plan_for, judge)

    def refusal(self, budgets: Budgets, sizes: BatchSizes) -> DoesNotFit:
        """What to tell a user whose budgets do not fit, with the least that would."""
        is_open = self._is_open(budgets)
        lack: DoesNotFit | None = None
        try:
            machines = [self._tight_machine(budgets)] if is_open else self._machines(budgets)
            self._plan_on(machines[0], budgets)
        except DoesNotFit as error:
            lack = error
        assert lack is not None, "no plan was found, so there is a reason"
        what, why, remedy = lack.what, lack.why, lack.remedy
        if is_open:
            what = (
                f"{self.shape.name} with {sizes} does not fit in "
                f"{format_bytes(budgets.ram_bytes)} of main memory"
            )
            why = f"however it is divided between computing and buffers, {lack.what}, and {why}"
        least = self._least(budgets)
        if least is not None:
            remedy = f"allow at least {least.written()}, or {remedy}"
        return DoesNotFit(what, why=why, remedy=remedy)

    def _least(self, budgets: Budgets) -> Budgets | None:
        """Budgets that are just enough; GPU memory first, as it cannot be bought alone."""
        gpu_bytes, ram_bytes = self._floors()
        if self._is_open(budgets):
            least_ram = least_bytes(
                gpu_bytes + ram_bytes,
                lambda ram: self._fits(Budgets(ram_bytes=ram, gpu_bytes=None)),
            )
            return None if least_ram is None else Budgets(ram_bytes=least_ram, gpu_bytes=None)
        least_gpu = budgets.gpu_bytes
        if least_gpu is not None:
            ample = max(_AMPLE_TIMES * ram_bytes, budgets.ram_bytes)
            if not self._fits(Budgets(ram_bytes=ample, gpu_bytes=least_gpu)):
                least_gpu = least_bytes(
                    gpu_bytes, lambda gpu: self._fits(Budgets(ram_bytes=ample, gpu_bytes=gpu))
                )
                if least_gpu is None:
                    return None
        if self._fits(Budgets(ram_bytes=budgets.ram_bytes, gpu_bytes=least_gpu)):
            return Budgets(ram_bytes=budgets.ram_bytes, gpu_bytes=least_gpu)
        least_ram = least_bytes(
            ram_bytes, lambda ram: self._fits(Budgets(ram_bytes=ram, gpu_bytes=least_gpu))
        )
        return None if least_ram is None else Budgets(ram_bytes=least_ram, gpu_bytes=least_gpu)

    def _fits(self, budgets: Budgets) -> bool:
        return bool(self.plans(budgets))

    def _floors(self) -> tuple[int, int]:
        """About what the leanest plan needs of GPU and of RAM."""
        plan = self._policy_plan(self._with_memory(1, 1))
        gpu_bytes = int(plan.ledger.total(Tier.GPU) / GPU_SHARE) + gpu_rounding_bytes(self.layout)
        ram_bytes = needed_ram_bytes(plan, self.layout) + self.held_bytes
        return gpu_bytes, ram_bytes + self._reserved(Budgets(ram_bytes=ram_bytes, gpu_bytes=None))

    def _reserved(self, budgets: Budgets) -> int:
        return budgets.reserved_bytes(
            num_blocks=len(self.layout.blocks), computes_in_ram=self.shares_ram
        )

    def _is_open(self, budgets: Budgets) -> bool:
        return self.shares_ram and budgets.gpu_bytes is None

    def _machines(self, budgets: Budgets) -> list[Machine]:
        if self._is_open(budgets):
            parts = [int(budgets.ram_bytes * share) for share in _GPU_SHARES]
            return [self._with_memory(part, budgets.ram_bytes - part) for part in parts]
        gpu_bytes = budgets.gpu_bytes or self.machine.gpu.memory_bytes
        return [self._with_memory(gpu_bytes, budgets.ram_bytes)]

    def _tight_machine(self, budgets: Budgets) -> Machine:
        """Main memory divided in proportion to what the leanest plan needs of either."""
        gpu_bytes, ram_bytes = self._floors()
        part = budgets.ram_bytes * gpu_bytes // (gpu_bytes + ram_bytes)
        return self._with_memory(part, budgets.ram_bytes - part)

    def _with_memory(self, gpu_bytes: int, ram_bytes: int) -> Machine:
        gpu_bytes -= gpu_rounding_bytes(self.layout)
        ram_bytes -= self.held_bytes
        return self.machine.with_gpu_memory(max(1, gpu_bytes)).with_ram(max(1, ram_bytes))

    def _policy_plan(self, offered: Machine) -> Plan:
        plan = make_plan(self.policy, offered, self.shape, self.workload)
        plan = with_state_of(self.layout, plan)
        _require_runnable(plan)
        return plan

    def _plan_on(self, machine: Machine, budgets: Budgets) -> Plan:
        """A plan whose pools, residents and roundings stay within the machine's RAM.

        Raises:
            DoesNotFit: there is none.
        """
        allowed, layout = machine.ram_bytes, self.layout
        needed = self._reserved(budgets) + rounding_bytes(layout)
        usable = allowed - needed
        for attempt in range(_MOST_ATTEMPTS):
            if usable <= 0:
                break
            # A policy leaves a share of RAM to the system; here all of the budget is the engine's.
            offered = machine.with_ram(max(1, int(usable / RAM_SHARE)))
            plan = self._policy_plan(offered)
            if plan.system.uses_residency:
                plan.ledger.require_fit(f"{self.shape.name} with {plan.policy}")
            needed = needed_ram_bytes(plan, layout) + self._reserved(budgets)
            if needed <= allowed or callable(self.policy) or not plan.system.uses_residency:
                return plan
            # Whole blocks of state come and go with a little RAM: ask for ever larger steps, so
            # that a generous budget never fails where a smaller one does.
            usable -= (needed - allowed) << attempt
        raise DoesNotFit(
            f"{format_bytes(allowed)} of RAM are allowed for {self.shape.name}",
            why=f"buffers alone need {format_bytes(needed)}",
            remedy="use a model with smaller blocks",
        )


def master_format_of(policy: str | Policy, compute_format: ComputeFormat) -> MasterFormat:
    """How a policy's system keeps masters. A function does not say before it has planned.

    Raises:
        ConfigError: there is no policy of that name.
    """
    default = MasterFormat.default_for(compute_format)
    if callable(policy) or system_policy(policy).system.state.needs_weights_to_update:
        return default
    return MasterFormat.WHOLE


def with_state_of(layout: StateLayout, plan: Plan) -> Plan:
    """The plan with the bytes per parameter that the store really has."""
    is_split = layout.master_format is MasterFormat.SPLIT
    state = SPLIT_STATE if is_split else PLAIN_STATE
    return replace(plan, system=replace(plan.system, state=state))


def _require_runnable(plan: Plan) -> None:
    system = plan.system
    if system.home is Tier.GPU or system.update_tier is Tier.GPU or plan.num_gpus > 1:
        raise ConfigError(
            f"the policy {plan.policy} cannot be run, only simulated",
            why="the engine keeps states on SSD or in RAM, updates them on the CPU, and drives one "
            "GPU",
            remedy='use "lohan+" or "lohan"',
        )


def choices_of(plan: Plan, *, shares_ram: bool) -> dict[BlockId, BlockChoices]:
    """What happens to every block's outputs; `shares_ram` as the device says it."""
    # Where the device computes from main memory, what goes to RAM stays where it is.
    here = (Choice.KEEP, Choice.SWAP_TO_RAM) if shares_ram else (Choice.KEEP,)
    return {
        BlockId(number): BlockChoices(
            stored=frozenset(
                index for index, choice in block.choices if choice is not Choice.RECOMPUTE
            ),
            kept=frozenset(index for index, choice in block.choices if choice in here),
            names={
                operator.index: operator.name.rpartition("/")[2].rpartition("+")[2]
                for operator in plan.block_shape(BlockId(number)).operators
            },
        )
        for number, block in enumerate(plan.blocks)
    }


def faster_plan(
    before: PlannedRun, machine: Machine, plan: Callable[[ModelShape, BatchSizes], PlannedRun]
) -> PlannedRun | None:
    """A plan for a run that is going on that is clearly faster on the machine as it is known by
    now, if there is one. States that live in RAM stay there."""
    try:
        planned = plan(before.plan.shape, before.sizes)
    except DoesNotFit:
        # Beside what lives in RAM by now there may be room for no other plan: this one runs.
        return None
    is_faster = planned.seconds < _CLEARLY_FASTER * seconds_of(before.plan, machine)
    return planned if is_faster else None


def pieces_of(plan: Plan) -> dict[BlockId, int]:
    """In how many pieces each block is updated."""
    trained = updated_parameters(plan.shape, plan.workload)
    largest = part_parameters(max(trained), plan.num_update_parts)
    return {
        BlockId(number): max(1, len(update_parts(count, largest)))
        for number, count in enumerate(trained)
    }
