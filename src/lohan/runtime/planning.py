"""From a model's shape and the sizes of a batch to a plan the engine can run within its budgets.

Owns the machine as the budgets leave it, and the check that all memory of the schedule fits.
Decides nothing itself: a policy does. Called by the engine before the first step and when batches
outgrow the plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lohan.errors import ConfigError, DoesNotFit
from lohan.hardware.machine import Machine
from lohan.model.recompute import recomputation
from lohan.model.shape import BlockShape, ModelShape
from lohan.plan import make_plan
from lohan.plan.plan import BlockPlan, Plan
from lohan.plan.policies import system_named
from lohan.plan.policies.our_memory import RAM_SHARE
from lohan.plan.pools import part_parameters, trained_parameters, update_parts
from lohan.plan.system import PLAIN_STATE, SPLIT_STATE
from lohan.plan.workload import Workload
from lohan.runtime.swap_modes import BlockChoices
from lohan.runtime.traced_model import BatchSizes
from lohan.runtime.write_limit import (
    WRITE_PRICES,
    Candidate,
    WriteLimit,
    dearer_writes,
    fastest_within,
)
from lohan.schedule.task import Pool
from lohan.simulate.quick import quick_step
from lohan.store import (
    ComputeFormat,
    MasterFormat,
    StateLayout,
    parts_of_kinds,
    resident_bytes,
)
from lohan.units import format_bytes
from lohan.vocabulary import BlockId, Choice, TensorKind, Tier

Policy = Callable[[Machine, ModelShape, Workload], Plan]

_GPU_SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)
"""Shares of main memory given to the GPU tier, tried where both are one memory."""
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes the engine may use. Where the device shares RAM, `gpu_bytes` may be open (None)."""

    ram_bytes: int
    gpu_bytes: int | None
    scratch_bytes: int
    writes: WriteLimit | None = None
    """Of the whole run, to the SSDs."""


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
) -> PlannedRun:
    """Plan a run within the budgets.

    Args:
        fixed_residents: what lives in RAM already and stays there.

    Raises:
        DoesNotFit: no plan of this policy stays within them, that of writes included.
    """
    workload = Workload(
        batch=sizes.num_micro_batches * sizes.micro_batch,
        sequence=max(1, sizes.sequence),
        clips_gradients=clips_gradients,
        num_micro_batches=sizes.num_micro_batches,
    )
    found: list[Candidate] = []
    refusal: DoesNotFit | None = None
    if fixed_residents is not None:
        # What lives in RAM stays there: the rest of RAM is planned anew.
        held = resident_bytes(
            layout, parts_of_kinds(layout, [block.residents for block in fixed_residents])
        )
        budgets = replace(budgets, ram_bytes=max(1, budgets.ram_bytes - held))
    is_limited = budgets.writes is not None and not callable(policy)
    for candidate in _machines(machine, budgets, shares_ram):
        for price in WRITE_PRICES if is_limited else WRITE_PRICES[:1]:
            priced = dearer_writes(candidate, price)
            try:
                plan = _fitting_plan(policy, priced, shape, workload, budgets, layout, shares_ram)
            except DoesNotFit as error:
                refusal = refusal or error
                continue
            step = quick_step(plan, candidate)
            found.append(Candidate(plan=plan, machine=candidate, step=step))
    if not found:
        assert refusal is not None
        raise refusal
    # A run that is going on ends by what it has written, not by what is predicted.
    best = fastest_within(found, budgets.writes, is_binding=fixed_residents is None)
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
        choices=choices_of(plan),
        num_pieces=pieces_of(plan),
        seconds=seconds_of(plan, used) if fixed_residents is not None else seconds,
    )


def seconds_of(plan: Plan, machine: Machine) -> float:
    """What a step of a plan takes, as simulated."""
    return quick_step(plan, machine).step_seconds


def _machines(machine: Machine, budgets: Budgets, shares_ram: bool) -> list[Machine]:
    """The machine as the budgets leave it; several where GPU and RAM are one memory."""
    if not shares_ram or budgets.gpu_bytes is not None:
        gpu_bytes = budgets.gpu_bytes or machine.gpu.memory_bytes
        return [machine.with_gpu_memory(gpu_bytes).with_ram(budgets.ram_bytes)]
    return [
        machine.with_gpu_memory(int(budgets.ram_bytes * share)).with_ram(
            int(budgets.ram_bytes * (1 - share))
        )
        for share in _GPU_SHARES
    ]


def _fitting_plan(
    policy: str | Policy,
    machine: Machine,
    shape: ModelShape,
    workload: Workload,
    budgets: Budgets,
    layout: StateLayout,
    shares_ram: bool,
) -> Plan:
    """A plan whose pools, residents and roundings stay within the machine's RAM."""
    allowed = machine.ram_bytes
    usable = allowed - budgets.scratch_bytes - rounding_bytes(layout)
    for _ in range(4):
        if usable <= 0:
            break
        # A policy leaves a share of RAM to the system; here all of the budget is the engine's.
        offered = machine.with_ram(max(1, int(usable / RAM_SHARE)))
        make = policy if callable(policy) else _by_name(policy)
        plan = with_state_of(layout, make(offered, shape, workload))
        _require_runnable(plan)
        if plan.system.uses_residency:
            plan.ledger.require_fit(f"{shape.name} with {plan.policy}")
        needed = needed_ram_bytes(plan, layout) + budgets.scratch_bytes
        if needed <= allowed or callable(policy) or not plan.system.uses_residency:
            return plan
        usable -= needed - allowed
    raise DoesNotFit(
        f"{format_bytes(allowed)} of RAM are allowed for {shape.name}",
        why=f"buffers alone need more: {format_bytes(rounding_bytes(layout))} go to rounding",
        remedy="allow more RAM",
    )


def master_format_of(policy: str | Policy, compute_format: ComputeFormat) -> MasterFormat:
    """How a policy's system keeps masters. A function does not say before it has planned.

    Raises:
        ConfigError: there is no policy of that name.
    """
    default = MasterFormat.default_for(compute_format)
    if callable(policy) or system_named(policy).state.needs_weights_to_update:
        return default
    return MasterFormat.WHOLE


def with_state_of(layout: StateLayout, plan: Plan) -> Plan:
    """The plan with the bytes per parameter that the store really has."""
    is_split = layout.master_format is MasterFormat.SPLIT
    state = SPLIT_STATE if is_split else PLAIN_STATE
    return replace(plan, system=replace(plan.system, state=state))


def _by_name(policy: str) -> Policy:
    return lambda machine, shape, workload: make_plan(policy, machine, shape, workload)


def _require_runnable(plan: Plan) -> None:
    system = plan.system
    if system.home is Tier.GPU or system.update_tier is Tier.GPU or plan.num_gpus > 1:
        raise ConfigError(
            f"the policy {plan.policy} cannot be run, only simulated",
            why="the engine keeps states on SSD or in RAM, updates them on the CPU, and drives one "
            "GPU",
            remedy='use "lohan+" or "lohan"',
        )


def needed_ram_bytes(plan: Plan, layout: StateLayout) -> int:
    """RAM of the schedule's pools in RAM, of what is resident, and of roundings."""
    from lohan.schedule import RollingSchedule

    residents = parts_of_kinds(layout, kinds_in_ram(plan))
    return (
        pools_bytes(RollingSchedule(plan).pools, {Tier.RAM})
        + resident_bytes(layout, residents)
        + rounding_bytes(layout)
        + swap_rounding_bytes(plan)
    )


def kinds_in_ram(plan: Plan) -> list[list[TensorKind]]:
    """State kinds of each block that live in RAM."""
    states = (TensorKind.P16, TensorKind.P32, TensorKind.OS32)
    return [
        [kind for kind in states if plan.home_of(BlockId(number), kind) is Tier.RAM]
        for number in range(len(plan.blocks))
    ]


def pools_bytes(pools: Mapping[str, Pool], tiers: set[Tier]) -> int:
    """Capacity of all pools of some tiers."""
    return sum(pool.capacity_bytes for pool in pools.values() if pool.tier in tiers)


def rounding_bytes(layout: StateLayout) -> int:
    """What rounding to pages, to pieces of updates and between tensors adds to buffers, at most."""
    num_tensors = max((len(block.tensors) for block in layout.blocks), default=0)
    per_piece = 14 * (2 * 4096) + 6 * _PAGE_BYTES + 14 * 32 * num_tensors
    return 8 * per_piece + (4 * len(layout.blocks) + 32) * (_PAGE_BYTES + 64 * num_tensors)


def swap_rounding_bytes(plan: Plan) -> int:
    """What aligning swapped outputs adds, at most."""
    return sum(area_slack_bytes(block, plan.num_micro_batches) for block in plan.blocks)


def area_slack_bytes(block: BlockPlan, num_micro_batches: int) -> int:
    """The same for one block and tier."""
    # Operators may have more than one output, and several tensors may enter a block.
    return 64 * 4 * (len(block.choices) + 4) * num_micro_batches + _PAGE_BYTES


def choices_of(plan: Plan) -> dict[BlockId, BlockChoices]:
    """What the dispatch modes do with every block's outputs."""
    return {
        BlockId(number): _choices(plan.block_shape(BlockId(number)), block, plan)
        for number, block in enumerate(plan.blocks)
    }


def _choices(shape: BlockShape, block: BlockPlan, plan: Plan) -> BlockChoices:
    stored = frozenset(index for index, choice in block.choices if choice is not Choice.RECOMPUTE)
    skipped: frozenset[int] = frozenset()
    if plan.system.skips_unneeded:
        again = recomputation(shape, stored).operators
        everything = {operator.index for operator in shape.operators}
        skipped = frozenset(everything - stored - set(again))
    return BlockChoices(
        stored=stored,
        skipped=skipped,
        names={
            operator.index: operator.name.rpartition("/")[2].rpartition("+")[2]
            for operator in shape.operators
        },
        is_binding=False,
    )


def pieces_of(plan: Plan) -> dict[BlockId, int]:
    """In how many pieces each block is updated."""
    trained = trained_parameters(plan.shape)
    largest = part_parameters(max(trained), plan.num_update_parts)
    return {
        BlockId(number): max(1, len(update_parts(count, largest)))
        for number, count in enumerate(trained)
    }
