"""Checks of a schedule before anything runs: complete, acyclic, leases balanced, within the ledger.

A schedule that fails is a mistake of the builder, so every failure is a ScheduleError. Deadlock is
a property of the list: lanes in order plus dependencies must have no cycle.
"""

from collections import Counter
from itertools import pairwise

from lohan.errors import ScheduleError
from lohan.plan.plan import Plan
from lohan.plan.pools import updated_parameters
from lohan.schedule.task import Compute, Schedule
from lohan.vocabulary import ComputeKind, PoolName, TaskId

_REMEDY = "report this schedule; it is a mistake of the builder"


def check_schedule(schedule: Schedule, plan: Plan) -> None:
    """Refuse a schedule that cannot run.

    Raises:
        ScheduleError: naming the task and what is wrong with it.
    """
    check_lanes(schedule)
    check_acyclic(schedule)
    check_leases(schedule)
    check_serial(schedule)
    check_complete(schedule, plan)


def check_lanes(schedule: Schedule) -> None:
    """Every task stands in its own lane exactly once, and comes after tasks that exist."""
    lane_of = {task: lane for lane, ids in schedule.lanes.items() for task in ids}
    num_listed = Counter(task for ids in schedule.lanes.values() for task in ids)
    for task in schedule.tasks:
        if num_listed[task.id] != 1 or lane_of[task.id] is not task.lane:
            raise ScheduleError(
                f"{task.name} is listed {num_listed[task.id]} times, last on "
                f"{lane_of.get(task.id)}",
                why=f"lane {task.lane} runs each of its tasks once",
                remedy=_REMEDY,
            )
        for before in task.after:
            if not 0 <= before < len(schedule.tasks):
                raise ScheduleError(
                    f"{task.name} comes after task {before}, which does not exist",
                    why=f"there are {len(schedule.tasks)} tasks",
                    remedy=_REMEDY,
                )


def topological_order(schedule: Schedule) -> list[TaskId]:
    """The tasks in an order that respects lanes and dependencies; shorter if there is a cycle."""
    followers: list[list[TaskId]] = [[] for _ in schedule.tasks]
    waiting = [len(task.after) for task in schedule.tasks]
    for task in schedule.tasks:
        for before in task.after:
            followers[before].append(task.id)
    if schedule.is_settled:
        for ids in schedule.lanes.values():
            for before, after in pairwise(ids):
                followers[before].append(after)
                waiting[after] += 1
    ready = [task.id for task in schedule.tasks if not waiting[task.id]]
    order = []
    while ready:
        task_id = ready.pop()
        order.append(task_id)
        for follower in followers[task_id]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return order


def check_acyclic(schedule: Schedule) -> None:
    """Lanes in order plus dependencies have no cycle."""
    order = topological_order(schedule)
    if len(order) == len(schedule.tasks):
        return
    reached = set(order)
    stuck = next(task for task in schedule.tasks if task.id not in reached)
    raise ScheduleError(
        f"{len(schedule.tasks) - len(order)} tasks wait for each other, {stuck.name} of step "
        f"{stuck.step} among them",
        why="a cycle of dependencies would hang the run",
        remedy=_REMEDY,
    )


def check_leases(schedule: Schedule) -> None:
    """Every lease is taken once and returned at most once; no lease exceeds its pool."""
    taken: dict[tuple[PoolName, str], int] = {}
    for task in schedule.tasks:
        for lease in task.leases:
            key = (lease.pool, lease.key)
            if key in taken or lease.nbytes > schedule.pools[lease.pool].capacity_bytes:
                capacity = schedule.pools[lease.pool].capacity_bytes
                raise ScheduleError(
                    f"{task.name} leases {lease.nbytes} bytes as {lease.key} from {lease.pool}",
                    why="it was leased before"
                    if key in taken
                    else f"the pool holds {capacity} bytes",
                    remedy=_REMEDY,
                )
            taken[key] = lease.nbytes
    returned = Counter((lease.pool, lease.key) for task in schedule.tasks for lease in task.returns)
    for task in schedule.tasks:
        for lease in task.returns:
            key = (lease.pool, lease.key)
            if taken.get(key) != lease.nbytes or returned[key] != 1:
                raise ScheduleError(
                    f"{task.name} returns {lease.nbytes} bytes as {lease.key} to {lease.pool}",
                    why=f"it was leased with {taken.get(key)} bytes and returned "
                    f"{returned[key]} times",
                    remedy=_REMEDY,
                )


def check_serial(schedule: Schedule) -> None:
    """The tasks could run one by one as listed: so no order of priorities can hang (`task`)."""
    used = dict.fromkeys(schedule.pools, 0)
    for task in schedule.tasks:
        for lease in task.leases:
            used[lease.pool] += lease.nbytes
        for lease in task.leases:
            capacity = schedule.pools[lease.pool].capacity_bytes
            if used[lease.pool] > capacity:
                raise ScheduleError(
                    f"{task.name} of step {task.step} finds {lease.pool} with {used[lease.pool]} "
                    f"of {capacity} bytes in use when tasks run one by one",
                    why="lanes could end up waiting for each other's buffers",
                    remedy=_REMEDY,
                )
        for lease in task.returns:
            used[lease.pool] -= lease.nbytes
        for before in task.after:
            # Settling adds edges from wherever room came from; `check_acyclic` judges those.
            if before >= task.id and not schedule.is_settled:
                raise ScheduleError(
                    f"{task.name} of step {task.step} comes after {schedule.task(before).name}, "
                    "which is listed behind it",
                    why="the list must be an order in which the tasks could run one by one",
                    remedy=_REMEDY,
                )


def check_complete(schedule: Schedule, plan: Plan) -> None:
    """Every block goes forward and backward once a step, and all it trains is updated."""
    trained = updated_parameters(plan.shape, plan.workload)
    passes: Counter[tuple[int, int, ComputeKind]] = Counter()
    updated: Counter[tuple[int, int]] = Counter()
    for task in schedule.tasks:
        if isinstance(task.action, Compute):
            passes[task.step, task.block, task.action.kind] += 1
            if task.action.kind is ComputeKind.UPDATE:
                updated[task.step, task.block] += task.action.num_parameters
    for step in range(schedule.num_steps):
        for block in range(schedule.num_blocks):
            for kind in (ComputeKind.FORWARD, ComputeKind.BACKWARD):
                if passes[step, block, kind] != 1:
                    raise ScheduleError(
                        f"block {block} has {passes[step, block, kind]} {kind} tasks in step "
                        f"{step}",
                        why="each block goes through each pass once a step",
                        remedy=_REMEDY,
                    )
            if updated[step, block] != trained[block]:
                raise ScheduleError(
                    f"block {block} updates {updated[step, block]} parameters in step {step}",
                    why=f"it trains {trained[block]}",
                    remedy=_REMEDY,
                )
