"""Every way a schedule can be wrong is found before anything runs."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lohan.errors import ScheduleError
from lohan.plan import Plan, Workload, make_plan
from lohan.schedule import Lease, Schedule, Task, build_schedule, check_schedule
from lohan.schedule.check import check_serial
from lohan.vocabulary import ComputeKind, Lane, TaskId
from support.hand_made import block, machine, model, operator

SHAPE = model(block(input_mb=0), block(operator(0)), block(operator(0)), block(operator(0)))


@pytest.fixture
def plan() -> Plan:
    return make_plan("lohan+", machine(), SHAPE, Workload(batch=1, sequence=16))


@pytest.fixture
def schedule(plan: Plan) -> Schedule:
    return build_schedule(plan, num_steps=2)


def with_task(schedule: Schedule, number: int, **changes: object) -> Schedule:
    tasks = list(schedule.tasks)
    tasks[number] = replace(tasks[number], **changes)  # type: ignore[arg-type]
    return replace(schedule, tasks=tuple(tasks))


def first(schedule: Schedule, kind: ComputeKind) -> Task:
    return next(task for task in schedule.tasks if task.action.kind is kind)


def refused(schedule: Schedule, plan: Plan, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        check_schedule(schedule, plan)


def test_a_built_schedule_is_accepted(schedule: Schedule, plan: Plan) -> None:
    check_schedule(schedule, plan)


def lanes_with(
    schedule: Schedule, lane: Lane, ids: tuple[TaskId, ...]
) -> Mapping[Lane, tuple[TaskId, ...]]:
    return {**schedule.lanes, lane: ids}


def test_a_task_listed_twice_never_or_on_another_lane(schedule: Schedule, plan: Plan) -> None:
    ids = schedule.lanes[Lane.GPU]
    refused(replace(schedule, lanes=lanes_with(schedule, Lane.GPU, ids + ids[:1])), plan, "2 times")
    refused(replace(schedule, lanes=lanes_with(schedule, Lane.GPU, ids[1:])), plan, "0 times")
    refused(with_task(schedule, ids[0], lane=Lane.CPU), plan, "last on gpu")


def test_a_dependency_that_does_not_exist(schedule: Schedule, plan: Plan) -> None:
    refused(with_task(schedule, 3, after=(TaskId(10**6),)), plan, "does not exist")


def test_tasks_that_wait_for_each_other(schedule: Schedule, plan: Plan) -> None:
    forward = first(schedule, ComputeKind.FORWARD)
    last = next(task for task in reversed(schedule.tasks) if forward.id in task.after)
    refused(with_task(schedule, forward.id, after=(last.id,)), plan, "wait for each other")


def test_a_lane_order_against_the_dependencies(schedule: Schedule, plan: Plan) -> None:
    ids = schedule.lanes[Lane.GPU]
    turned = lanes_with(schedule, Lane.GPU, ids[::-1])
    refused(replace(schedule, lanes=turned, is_settled=True), plan, "wait for each other")


def test_leases_taken_twice_too_large_returned_wrongly(schedule: Schedule, plan: Plan) -> None:
    task = next(task for task in schedule.tasks if task.leases)
    lease = task.leases[0]
    refused(with_task(schedule, task.id, leases=task.leases * 2), plan, "leased before")
    large = (Lease(lease.pool, "large", 10**15),)
    refused(with_task(schedule, task.id, leases=task.leases + large), plan, "the pool holds")
    giver = next(task for task in schedule.tasks if lease in task.returns)
    refused(with_task(schedule, giver.id, returns=giver.returns * 2), plan, "returned 2 times")
    other = (Lease(lease.pool, lease.key, lease.nbytes + 1),)
    refused(with_task(schedule, giver.id, returns=other), plan, "returns")


def test_pools_that_the_serial_order_overfills(schedule: Schedule, plan: Plan) -> None:
    tasks = tuple(
        replace(task, returns=tuple(one for one in task.returns if one.pool != "weights"))
        for task in schedule.tasks
    )
    refused(replace(schedule, tasks=tasks), plan, "one by one")


def test_a_list_that_is_no_serial_order(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match="listed behind it"):
        check_serial(with_task(schedule, 0, after=(TaskId(1),)))


def test_a_pass_or_an_update_that_is_missing(schedule: Schedule, plan: Plan) -> None:
    forward = first(schedule, ComputeKind.FORWARD)
    action = replace(forward.action, kind=ComputeKind.RECOMPUTE)  # type: ignore[arg-type]
    refused(with_task(schedule, forward.id, action=action), plan, "0 forward tasks")
    update = first(schedule, ComputeKind.UPDATE)
    action = replace(update.action, num_parameters=1)  # type: ignore[arg-type]
    refused(with_task(schedule, update.id, action=action), plan, "updates 1 parameters")
