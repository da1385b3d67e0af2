"""Which task may run next, against a judge that looks at every task anew each time."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.schedule.ready import Ready
from lohan.schedule.task import Compute, Lease, Pool, Task
from lohan.vocabulary import BlockId, ComputeKind, Lane, TaskId, Tier

LANES = (Lane.SSD_READ, Lane.CPU, Lane.GPU)
DRIVEN = Lane.GPU
"""A lane whose tasks are started as listed, without asking for the most urgent one."""
POOLS = ("a", "b")


@dataclass
class Judge:
    """The rule, spelled out over all tasks."""

    pools: dict[str, Pool]
    added: list[Task] = field(default_factory=list)
    started: set[TaskId] = field(default_factory=set)
    done: set[TaskId] = field(default_factory=set)

    def free_bytes(self, pool: str) -> int:
        free = self.pools[pool].capacity_bytes
        for task in self.added:
            if task.id in self.started:
                free -= sum(lease.nbytes for lease in task.leases if lease.pool == pool)
            if task.id in self.done:
                free += sum(lease.nbytes for lease in task.returns if lease.pool == pool)
        return free

    def is_next_in_line(self, task: Task, pool: str) -> bool:
        return all(
            other.id in self.started or all(lease.pool != pool for lease in other.leases)
            for other in self.added
            if other.id < task.id
        )

    def may_run(self, task: Task) -> bool:
        if task.id in self.started or any(before not in self.done for before in task.after):
            return False
        return all(
            self.is_next_in_line(task, pool)
            and sum(lease.nbytes for lease in task.leases if lease.pool == pool)
            <= self.free_bytes(pool)
            for pool in {lease.pool for lease in task.leases}
        )

    def next_of(self, lane: Lane) -> Task | None:
        found = [task for task in self.added if task.lane is lane and self.may_run(task)]
        return min(found, key=lambda task: (task.priority, task.id), default=None)


@st.composite
def task_lists(draw: st.DrawFn) -> tuple[list[Task], dict[str, Pool]]:
    """Tasks that could run one by one as listed, and pools that are just large enough for that."""
    tasks: list[Task] = []
    held: list[tuple[TaskId, Lease]] = []
    used, most = dict.fromkeys(POOLS, 0), dict.fromkeys(POOLS, 0)
    for number in range(draw(st.integers(0, 14))):
        name = TaskId(number)
        after = set(draw(st.lists(st.sampled_from(range(number)), max_size=3)) if number else [])
        sizes = draw(st.lists(st.tuples(st.sampled_from(POOLS), st.integers(0, 3)), max_size=3))
        leases = [Lease(pool, f"{number} {n}", nbytes) for n, (pool, nbytes) in enumerate(sizes)]
        for lease in leases:
            used[lease.pool] += lease.nbytes
            most[lease.pool] = max(most[lease.pool], used[lease.pool])
        held += [(name, lease) for lease in leases]
        given_back = [one for one in held if draw(st.booleans())]
        held = [one for one in held if one not in given_back]
        for lessee, lease in given_back:
            used[lease.pool] -= lease.nbytes
            after |= {lessee} - {name}
        tasks.append(
            Task(
                name,
                draw(st.sampled_from(LANES)),
                BlockId(0),
                0,
                Compute(ComputeKind.FORWARD),
                tuple(TaskId(before) for before in sorted(after)),
                tuple(leases),
                tuple(lease for _, lease in given_back),
                draw(st.tuples(st.integers(0, 2))),
            )
        )
    return tasks, {pool: Pool(pool, Tier.RAM, most[pool]) for pool in POOLS}


@settings(max_examples=150, deadline=None)
@given(given_list=task_lists(), seed=st.integers(0, 2**32))
def test_ready_agrees_with_a_scan_of_all_tasks(
    given_list: tuple[list[Task], dict[str, Pool]], seed: int
) -> None:
    tasks, pools = given_list
    choose = random.Random(seed)
    ready, judge = Ready(pools), Judge(pools)
    running: dict[Lane, Task] = {}
    to_come = list(tasks)
    while len(judge.done) < len(tasks):
        undone = [task for task in judge.added if task.id not in judge.done]
        assert len(ready) == len(undone)
        assert [task for task in tasks if task.id in ready] == undone
        for task in undone:
            assert ready.may_run(task) == judge.may_run(task), task
            assert ready.is_behind(task) == any(one not in judge.done for one in task.after)
        assert {lane: ready.next_of(lane) for lane in LANES} == {
            lane: judge.next_of(lane) for lane in LANES
        }
        assert all(ready.free_bytes(pool) == judge.free_bytes(pool) for pool in POOLS)

        startable = [task for lane in LANES if lane is not DRIVEN and (task := judge.next_of(lane))]
        driven = [task for task in undone if task.lane is DRIVEN and task.id not in judge.started]
        startable += [task for task in driven[:1] if judge.may_run(task)]
        startable = [task for task in startable if task.lane not in running]
        # Whatever the order, something can go on.
        assert running or startable or to_come

        move = choose.choice(
            ["add"] * bool(to_come) + ["start"] * bool(startable) + ["finish"] * bool(running)
        )
        if move == "add":
            count = choose.randint(1, len(to_come))
            ready.add(to_come[:count])
            judge.added += to_come[:count]
            to_come = to_come[count:]
        elif move == "start":
            task = choose.choice(startable)
            assert ready.has_room(task)
            ready.start(task)
            judge.started.add(task.id)
            running[task.lane] = task
        else:
            task = running.pop(choose.choice(list(running)))
            behind = [one for one in undone if ready.is_behind(one)]
            judge.done.add(task.id)
            assert ready.finish(task) == [
                one for one in behind if all(before in judge.done for before in one.after)
            ]
    assert not ready
    assert not any(ready._may_run.values()), "something done is kept"
