"""Random plans as schedules: they settle, are proven, keep their pools, balance their bytes."""

import itertools
import random
from dataclasses import replace

import pytest

from lohan.hardware.machine import Machine
from lohan.plan import Plan
from lohan.plan.pools import tied_trained, trained_parameters
from lohan.schedule import (
    Compute,
    Move,
    RollingSchedule,
    Schedule,
    Task,
    build_schedule,
    check_schedule,
)
from lohan.schedule.check import check_serial, topological_order
from lohan.schedule.task import WHOLE
from lohan.simulate import replay, settled_schedule, simulate_plan
from lohan.simulate.clock import Clock, ClockResult
from lohan.simulate.durations import Durations
from lohan.vocabulary import BlockId, ComputeKind, Lane, TaskId, TensorKind, Tier
from support.random_plans import random_plan, rolled_schedule

NUM_STEPS = 3
SEEDS = range(40)
OURS = range(1000, 1060)


class RandomDurations:
    """Every task takes 0.2 to 5 times as long as the machine would."""

    def __init__(self, machine: Machine, plan: Plan, seed: int) -> None:
        self._true = Durations(machine, plan.system.rates)
        self._seed = seed

    def of(self, task: Task) -> float:
        return self._true.of(task) * random.Random(self._seed * 100_003 + task.id).uniform(0.2, 5)


def run_with(
    schedule: Schedule, plan: Plan, machine: Machine, durations: object, *, by_priority: bool
) -> ClockResult:
    clock = Clock(schedule, durations, machine, plan.system.rates)  # type: ignore[arg-type]
    return clock.run(by_priority=by_priority)


def assert_pools_hold(schedule: Schedule, times: ClockResult) -> None:
    for _now, pool, nbytes in times.usage:
        assert 0 <= nbytes <= schedule.pools[pool].capacity_bytes, pool


def cases() -> list[tuple[int, str | None]]:
    return [(seed, None) for seed in SEEDS] + [(seed, "lohan+") for seed in OURS]


@pytest.mark.parametrize(("seed", "policy"), cases())
def test_every_schedule_settles_is_checked_and_holds_its_pools(
    seed: int, policy: str | None
) -> None:
    plan, machine = random_plan(seed, policy=policy)
    schedule = settled_schedule(plan, machine, num_steps=NUM_STEPS)
    check_schedule(schedule, plan)
    assert_pools_hold(schedule, replay(schedule, plan, machine))


@pytest.mark.parametrize(("seed", "policy"), cases()[::2])
def test_a_settled_order_needs_no_room_that_its_edges_do_not_prove(
    seed: int, policy: str | None
) -> None:
    plan, machine = random_plan(seed, policy=policy)
    schedule = settled_schedule(plan, machine, num_steps=NUM_STEPS)
    for perturbed in range(3):
        durations = RandomDurations(machine, plan, perturbed)
        # A lease that found no room would raise: replay never waits for a pool.
        times = run_with(schedule, plan, machine, durations, by_priority=False)
        assert_pools_hold(schedule, times)


@pytest.mark.parametrize(("seed", "policy"), cases()[1::2])
def test_no_durations_make_settling_hang(seed: int, policy: str | None) -> None:
    plan, machine = random_plan(seed, policy=policy)
    schedule = build_schedule(plan, num_steps=NUM_STEPS)
    check_serial(schedule)
    for perturbed in range(3):
        durations = RandomDurations(machine, plan, perturbed)
        run_with(schedule, plan, machine, durations, by_priority=True)


@pytest.mark.parametrize("seed", [*SEEDS[:10], *OURS[:20]])
def test_settling_and_replaying_give_the_same_times(seed: int) -> None:
    plan, machine = random_plan(seed, policy="lohan+" if seed in OURS else None)
    open_schedule = build_schedule(plan, num_steps=NUM_STEPS)
    durations = Durations(machine, plan.system.rates)
    settled = run_with(open_schedule, plan, machine, durations, by_priority=True)
    schedule = settled_schedule(plan, machine, num_steps=NUM_STEPS)
    if schedule.num_steps == NUM_STEPS:
        replayed = replay(schedule, plan, machine)
        assert replayed.start_seconds == settled.start_seconds
        assert replayed.end_seconds == settled.end_seconds


@pytest.mark.parametrize("seed", OURS)
def test_pools_and_constant_lines_are_within_the_ledger(seed: int) -> None:
    plan, machine = random_plan(seed, policy="lohan+")
    schedule = build_schedule(plan)
    for tier in (Tier.GPU, Tier.RAM):
        pools = sum(pool.capacity_bytes for pool in schedule.pools.values() if pool.tier is tier)
        assert pools + plan.ledger.constant(tier) <= plan.ledger.total(tier)
    step = simulate_plan(plan, machine)
    if plan.ledger.fits:
        for tier in (Tier.GPU, Tier.RAM):
            assert step.peak_bytes[tier] <= plan.ledger.budgets[tier]


@pytest.mark.parametrize(("seed", "policy"), cases()[::3])
def test_no_step_beats_the_roofline_and_results_repeat(seed: int, policy: str | None) -> None:
    plan, machine = random_plan(seed, policy=policy)
    step = simulate_plan(plan, machine)
    assert step.step_seconds >= step.roofline_seconds * (1 - 1e-9)
    assert step.step_seconds > 0
    again, _ = random_plan(seed, policy=policy)
    assert again == plan
    assert simulate_plan(again, machine) == step


@pytest.mark.parametrize("seed", OURS)
def test_steady_steps_are_no_shorter_than_the_roofline_before_the_result_says_so(seed: int) -> None:
    """The result never shows less than the roofline; the clock itself must not either."""
    plan, machine = random_plan(seed, policy="lohan+")
    schedule = settled_schedule(plan, machine)
    times = replay(schedule, plan, machine)
    ends = [0.0] * schedule.num_steps
    for task in schedule.tasks:
        if isinstance(task.action, Compute) and task.action.kind is ComputeKind.BACKWARD:
            ends[task.step] = max(ends[task.step], times.end_seconds[task.id])
    step = simulate_plan(plan, machine)
    assert ends[-2] - ends[-3] >= step.roofline_seconds * (1 - 1e-9)
    assert ends[-2] - ends[-3] == pytest.approx(step.step_seconds, rel=1e-9)


# Order of reads and writes -------------------------------------------------------------------


def ancestors(schedule: Schedule) -> list[int]:
    """For each task, the set of tasks that are sure to end before it starts, as bits."""
    known = [0] * len(schedule.tasks)
    previous: dict[TaskId, TaskId] = {}
    for ids in schedule.lanes.values():
        previous |= dict(zip(ids[1:], ids, strict=False))
    for task_id in topological_order(schedule):
        before = list(schedule.task(task_id).after)
        if task_id in previous:
            before.append(previous[task_id])
        for one in before:
            known[task_id] |= known[one] | (1 << one)
    return known


def is_move(task: Task, kind: TensorKind, source: Tier, target: Tier) -> bool:
    action = task.action
    return isinstance(action, Move) and (action.kind, action.source, action.target) == (
        kind,
        source,
        target,
    )


@pytest.mark.parametrize("seed", [*SEEDS, *OURS])
def test_reads_see_the_newest_state_and_writes_wait_for_the_last_use(seed: int) -> None:
    plan, machine = random_plan(seed, policy="lohan+" if seed in OURS else None, most_blocks=12)
    schedule = settled_schedule(plan, machine, num_steps=NUM_STEPS)
    known = ancestors(schedule)

    def chosen(kind: TensorKind, source: Tier, target: Tier) -> dict[tuple[int, int], list[Task]]:
        found: dict[tuple[int, int], list[Task]] = {}
        for task in schedule.tasks:
            if is_move(task, kind, source, target):
                found.setdefault((task.block, task.step), []).append(task)
        return found

    def assert_after(late: list[Task], early: list[Task]) -> None:
        for task in late:
            for before in early:
                if WHOLE not in (task.piece, before.piece) and task.piece != before.piece:
                    continue  # Pieces of one block touch different bytes.
                assert known[task.id] >> before.id & 1, f"{task.name} races {before.name}"

    updates: dict[tuple[int, int], list[Task]] = {}
    norms: dict[int, list[Task]] = {}
    for task in schedule.tasks:
        if isinstance(task.action, Compute) and task.action.kind is ComputeKind.UPDATE:
            updates.setdefault((task.block, task.step), []).append(task)
        if isinstance(task.action, Compute) and task.action.kind is ComputeKind.NORM:
            norms.setdefault(task.step, []).append(task)
    state_writes = chosen(TensorKind.OS32, Tier.RAM, Tier.SSD)
    state_reads = chosen(TensorKind.OS32, Tier.SSD, Tier.RAM)
    weight_reads = chosen(TensorKind.P16, Tier.SSD, Tier.RAM)
    weight_copies = chosen(TensorKind.P16, Tier.RAM, Tier.GPU)
    gradients = chosen(TensorKind.G16, Tier.GPU, Tier.RAM)
    spilled = chosen(TensorKind.G16, Tier.RAM, Tier.SSD)
    for step in range(schedule.num_steps):
        for block in range(schedule.num_blocks):
            sharers = [other for owner, other, _ in tied_trained(plan.shape) if owner == block]
            own, before = (block, step), (block, step - 1)
            for user in (block, *sharers):
                # What a pass reads is what the last update left, and not yet what the next makes.
                copies = weight_copies.get((user, step), [])
                reads = weight_reads.get((user, step), [])
                assert_after(copies, updates.get(before, []))
                assert_after(updates.get(own, []), copies)
                assert_after(state_writes.get(own, []), reads)
                if user == block and plan.blocks[block].defers_update:
                    continue
                if plan.home_of(BlockId(block), TensorKind.P16) is Tier.SSD:
                    assert_after(reads, state_writes.get(before, []))
                assert_after(updates.get(own, []), gradients.get((user, step), []))
            assert_after(state_reads.get(own, []), state_writes.get(before, []))
            assert_after(state_writes.get(own, []), updates.get(own, []))
            if plan.system.spills_gradients:
                assert_after(state_reads.get(own, []), spilled.get(own, []))
            assert_after(updates.get(own, []), norms.get(step, []))
    for (block, step), reads in chosen(TensorKind.A16, Tier.SSD, Tier.RAM).items():
        assert_after(reads, chosen(TensorKind.A16, Tier.RAM, Tier.SSD)[block, step])


# Bytes ---------------------------------------------------------------------------------------


def moved(schedule: Schedule, lane: Lane, kinds: set[TensorKind]) -> int:
    step = schedule.num_steps - 2
    return sum(
        task.action.nbytes
        for task in schedule.tasks
        if task.lane is lane
        and task.step == step
        and isinstance(task.action, Move)
        and task.action.kind in kinds
    )


STATES = {TensorKind.P16, TensorKind.P32, TensorKind.OS32, TensorKind.G16}
A16 = {TensorKind.A16}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("policy", "read", "written"),
    [
        ("lohan", 16, 14),
        ("lohan+naive-pipeline", 16, 14),
        ("lohan+serial-optimizer", 16, 14),
        ("lohan+", 14, 12),
        ("zero-infinity", 18, 16),
        ("zero-offload", 0, 0),
    ],
)
def test_bytes_per_parameter_are_those_of_the_system(
    policy: str, read: int, written: int, seed: int
) -> None:
    plan, machine = random_plan(seed, policy=policy, is_plain=True)
    trained = trained_parameters(plan.shape)
    kinds = plan.shape.blocks
    # Frozen weights are only read; a lookup and the head are fetched once.
    schedule = settled_schedule(plan, machine, num_steps=4)
    fetches = [num_fetches(plan, block) for block in range(len(kinds))]
    expected_read = expected_written = 0
    for block, (kind, count) in enumerate(zip(kinds, trained, strict=True)):
        residents = plan.blocks[block].residents
        in_ram = 2 * (TensorKind.P16 in residents) + 10 * (TensorKind.OS32 in residents)
        if not read:
            continue
        per_read = read - 2 * (2 - fetches[block])
        if policy == "lohan+":
            # What passes do not read once more, the update reads: it needs P16 too.
            per_read = 14 - 4 * (TensorKind.P16 in residents) - 10 * (TensorKind.OS32 in residents)
            if fetches[block] == 1 and TensorKind.P16 not in residents:
                # Its one fetch comes straight from a deferred update.
                per_read -= 2 * plan.blocks[block].defers_update
        expected_read += per_read * count
        expected_written += (written - in_ram) * count
        if TensorKind.P16 not in residents:
            expected_read += 2 * fetches[block] * kind.num_frozen_parameters
    assert moved(schedule, Lane.SSD_READ, STATES) == expected_read
    assert moved(schedule, Lane.SSD_WRITE, STATES) == expected_written


def num_fetches(plan: Plan, block: int) -> int:
    """How often a step brings a block's weights to the GPU."""
    kind, last = plan.shape.blocks[block], len(plan.shape.blocks) - 1
    return 1 if (block == 0 and kind.is_lookup) or block == last else 2


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("policy", ["lohan", "lohan+", "zero-infinity"])
def test_copies_between_gpu_and_ram_are_weights_gradients_and_activations(
    policy: str, seed: int
) -> None:
    plan, machine = random_plan(seed, policy=policy)
    schedule = settled_schedule(plan, machine, num_steps=4)
    copies = plan.num_gpus if plan.system.rates.shares_host_link else 1
    weight_copies = 1 if plan.system.rates.partitions_over_gpus else copies
    weights = gradients = 0
    for block, kind in enumerate(plan.shape.blocks):
        shared = sum(count for _, other, count in plan.shape.tied if other == block)
        shared_trained = sum(n for _, other, n in tied_trained(plan.shape) if other == block)
        fetches = num_fetches(plan, block)
        weights += 2 * fetches * (kind.num_parameters + shared) * weight_copies
        trained = kind.num_parameters - kind.num_frozen_parameters
        gradients += 2 * (trained + shared_trained) * weight_copies
    swapped = 0
    for block, kind in enumerate(plan.shape.blocks):
        batch, sequence = plan.batch_per_gpu, plan.workload.sequence
        decisions = plan.blocks[block]
        sizes = {op.index: op.output_bytes.at(batch, sequence) for op in kind.operators}
        pieces = [(decisions.input_choice, kind.input_bytes.at(batch, sequence))]
        pieces += [(choice, sizes[index]) for index, choice in decisions.choices]
        swapped += sum(nbytes for choice, nbytes in pieces if choice.value.startswith("swap"))
    assert moved(schedule, Lane.RAM_TO_GPU, {TensorKind.P16}) == weights
    assert moved(schedule, Lane.GPU_TO_RAM, {TensorKind.G16}) == gradients
    assert moved(schedule, Lane.GPU_TO_RAM, A16) == swapped * copies
    assert moved(schedule, Lane.RAM_TO_GPU, A16) == swapped * copies


def pieces_in_turn(tasks: list[Task]) -> bool:
    """Whether each piece of something comes after the piece before it, whatever takes how long."""
    pieces: dict[object, list[Task]] = {}
    for task in tasks:
        # Those of drives lease each for itself; a sum over ranks leases nothing.
        is_alone = task.lane in (Lane.SSD_READ, Lane.SSD_WRITE)
        if task.piece != WHOLE and not is_alone and task.action.kind is not ComputeKind.REDUCE:
            key = (task.lane, task.block, task.step, task.action.kind, task.of_pass)
            pieces.setdefault(key, []).append(task)
    return all(
        before.id in after.after
        for found in pieces.values()
        for before, after in itertools.pairwise(found)
    )


def test_pieces_that_share_a_lease_keep_their_order() -> None:
    """The first piece takes what all of them use, and the last gives it back."""
    num_in_pieces = 0
    for seed in OURS:
        plan, _ = random_plan(seed, policy="lohan+")
        schedule = build_schedule(replace(plan, num_update_parts=3), num_steps=NUM_STEPS)
        num_in_pieces += any(task.piece.of > 1 for task in schedule.tasks)
        assert pieces_in_turn(list(schedule.tasks)), seed
    assert num_in_pieces > 20


@pytest.mark.parametrize(("seed", "policy"), cases()[::2])
def test_steps_that_roll_on_and_flush_can_be_run_one_by_one(seed: int, policy: str | None) -> None:
    plan, _ = random_plan(seed, policy=policy)
    rolling = RollingSchedule(plan)
    tasks: list[Task] = []
    for _ in range(2):
        tasks += [*rolling.step(), *rolling.step(), *rolling.flush(), *rolling.evaluation()]
    check_serial(rolled_schedule(rolling, tasks, plan))
