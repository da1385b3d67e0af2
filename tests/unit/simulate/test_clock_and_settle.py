from dataclasses import replace

import pytest

from lohan.errors import ScheduleError
from lohan.paper import policy_named
from lohan.plan import Workload, make_plan
from lohan.plan.system import DrivingRates
from lohan.schedule import Compute, Lease, Move, Pool, Schedule, Task, build_schedule
from lohan.simulate import replay, trace_of
from lohan.simulate.clock import Clock
from lohan.simulate.durations import Durations
from lohan.simulate.simulator import settle
from lohan.vocabulary import BlockId, ComputeKind, Lane, TaskId, TensorKind, Tier
from support.hand_made import block, machine, model, operator

MOVE = Move(TensorKind.P16, Tier.SSD, Tier.RAM, 10**9)
OUT = Move(TensorKind.P16, Tier.RAM, Tier.SSD, 10**9)
UP = Move(TensorKind.P16, Tier.RAM, Tier.GPU, 10**9)
FLOPS = Compute(ComputeKind.FORWARD, flops=10**12)


def task(number: int, lane: Lane, action: Move | Compute, **more: object) -> Task:
    return Task(TaskId(number), lane, BlockId(0), 0, action, **more)  # type: ignore[arg-type]


def schedule_of(*tasks: Task, pool_bytes: int = 10) -> Schedule:
    lanes: dict[Lane, list[TaskId]] = {}
    for one in tasks:
        lanes.setdefault(one.lane, []).append(one.id)
    return Schedule(
        tasks=tasks,
        lanes={lane: tuple(ids) for lane, ids in lanes.items()},
        pools={"pool": Pool("pool", Tier.RAM, pool_bytes)},
        num_steps=1,
        num_blocks=1,
    )


def ends(schedule: Schedule, *, is_duplex: bool = False, interference: float = 0.0) -> list[float]:
    box, rates = machine(is_duplex=is_duplex), DrivingRates(copy_interference=interference)
    clock = Clock(schedule, Durations(machine(), DrivingRates()), box, rates)
    return clock.run(by_priority=True).end_seconds


def test_simplex_drives_share_their_time_and_duplex_ones_do_not() -> None:
    both = schedule_of(task(0, Lane.SSD_READ, MOVE), task(1, Lane.SSD_WRITE, OUT))
    assert ends(both) == pytest.approx([2.0, 2.0])
    assert ends(both, is_duplex=True) == pytest.approx([1.0, 1.0])


def test_a_copy_slows_the_gpu_only_while_it_lasts() -> None:
    both = schedule_of(task(0, Lane.GPU, FLOPS), task(1, Lane.RAM_TO_GPU, UP))
    # For one second the GPU does 0.75 of its work, then the rest at full speed.
    assert ends(both, interference=0.25) == pytest.approx([1.25, 1.0])


def test_one_processor_computes_and_updates_in_turns() -> None:
    update = Compute(ComputeKind.UPDATE, num_parameters=5 * 10**8)
    both = schedule_of(task(0, Lane.GPU, FLOPS), task(1, Lane.CPU, update))
    apart = ends(both)
    box = machine()
    box = replace(box, gpu=replace(box.gpu, is_processor=True))
    clock = Clock(both, Durations(box, DrivingRates()), box, DrivingRates())
    # Until the update ends each takes twice as long; compute does the rest at full speed.
    assert apart[1] < apart[0]
    assert clock.run(by_priority=True).end_seconds == pytest.approx([sum(apart), 2 * apart[1]])


def test_priorities_decide_where_a_lane_is_free_to_choose() -> None:
    late = task(0, Lane.SSD_READ, MOVE, priority=(1, 0))
    early = task(1, Lane.SSD_READ, MOVE, priority=(0, 1))
    assert ends(schedule_of(late, early)) == pytest.approx([2.0, 1.0])


def test_a_pool_grants_in_the_order_of_the_list_whatever_the_priorities() -> None:
    def lease(number: int) -> tuple[Lease, ...]:
        return (Lease("pool", str(number), 10),)

    first = task(0, Lane.SSD_READ, MOVE, leases=lease(0), returns=lease(0), priority=(9, 0))
    second = task(1, Lane.SSD_READ, MOVE, leases=lease(1), returns=lease(1), priority=(0, 1))
    assert ends(schedule_of(first, second)) == pytest.approx([1.0, 2.0])


def test_tasks_that_can_never_run_are_named_with_their_pool() -> None:
    greedy = task(0, Lane.SSD_READ, MOVE, leases=(Lease("pool", "a", 11),))
    with pytest.raises(ScheduleError, match=r"0 of 1 tasks.*pool \(10 of 11 bytes free\)"):
        ends(schedule_of(greedy))
    circle = schedule_of(
        task(0, Lane.SSD_READ, MOVE, after=(TaskId(1),)),
        task(1, Lane.SSD_READ, MOVE, after=(TaskId(0),)),
    )
    with pytest.raises(ScheduleError, match="nothing can go on"):
        ends(circle)


def test_a_replay_that_finds_no_room_is_an_error_and_never_a_wait() -> None:
    held = task(0, Lane.SSD_READ, MOVE, leases=(Lease("pool", "a", 10),))
    other = task(1, Lane.SSD_WRITE, OUT, leases=(Lease("pool", "b", 10),))
    schedule = replace(schedule_of(held, other), is_settled=True)
    rates = DrivingRates()
    clock = Clock(schedule, Durations(machine(), rates), machine(is_duplex=True), rates)
    with pytest.raises(ScheduleError, match="found no room in pool"):
        clock.run(by_priority=False)


def test_settling_adds_the_edges_that_prove_the_pool() -> None:
    lease_a, lease_b = (Lease("pool", "a", 10),), (Lease("pool", "b", 4),)
    first = task(0, Lane.SSD_READ, MOVE, leases=lease_a)
    user = task(1, Lane.GPU, FLOPS, after=(TaskId(0),), returns=lease_a)
    second = task(2, Lane.SSD_READ, MOVE, leases=lease_b, returns=lease_b)
    settled, _ = settle(schedule_of(first, user, second), machine(), DrivingRates())
    assert settled.is_settled
    assert settled.task(TaskId(2)).after == (1,)
    assert settled.lanes[Lane.SSD_READ] == (0, 2)


def test_only_a_settled_schedule_is_replayed() -> None:
    shape = model(*[block(operator(0))] * 3)
    plan = policy_named("lohan").plan(machine(), shape, Workload(batch=1, sequence=16))
    with pytest.raises(ScheduleError, match="no final order"):
        replay(build_schedule(plan), plan, machine())


def test_trace_has_a_span_per_task_and_memory_that_ends_where_it_began() -> None:
    shape = model(*[block(operator(0))] * 3)
    plan = make_plan("lohan+", machine(), shape, Workload(batch=1, sequence=16))
    schedule, _ = settle(build_schedule(plan, num_steps=2), machine(), plan.system.rates)
    trace = trace_of(schedule, replay(schedule, plan, machine()), plan, machine())
    assert len(trace.spans) == len(schedule.tasks)
    assert trace.is_simulated
    for counter in trace.counters:
        assert counter.used_bytes[-1] == schedule.initial[counter.tier]
