"""Which task may run next: the one rule, asked by the simulator and by the engine.

A task may run when everything it comes after is done, it is next in line at every pool it leases
from, and each of them has room. Pools grant in the order of the list (see "Why nothing can hang" in
`task`); a lane takes the task that may run with the smallest priority, then the smallest id. Once a
task may run only its own start changes that: nobody passes it in line, so nobody takes its room.

Owns what is undone, the lines at the pools and their free bytes. No clock, no threads, no locks:
`simulate.clock` asks on a virtual clock, `lanes.executor` with its lock held.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lohan.schedule.task import Pool, Task
from lohan.vocabulary import Lane, PoolName, TaskId


@dataclass(slots=True, eq=False)
class _Line:
    """The free bytes of a pool, and the tasks that will lease from it, in the order of the list."""

    free_bytes: int
    tasks: "deque[_Undone]" = field(default_factory=deque)


class _Undone:
    """A task that is not done."""

    __slots__ = ("followers", "may_run", "num_before", "task", "wants")

    def __init__(self, task: Task) -> None:
        self.task, self.num_before, self.may_run = task, 0, False
        self.followers: list[_Undone] = []
        self.wants: Sequence[tuple[_Line, int]] = ()
        """Bytes it leases from each of its pools together."""


class Ready:
    """Tasks that are not done, and which of them may run."""

    def __init__(self, pools: Mapping[PoolName, Pool]) -> None:
        self._lines = {name: _Line(pool.capacity_bytes) for name, pool in pools.items()}
        self._undone: dict[TaskId, _Undone] = {}
        self._may_run: dict[Lane, list[tuple[tuple[int, ...], TaskId, _Undone]]] = {
            lane: [] for lane in Lane
        }

    def __len__(self) -> int:
        """How many tasks are not done."""
        return len(self._undone)

    def __contains__(self, task: TaskId) -> bool:
        """Whether a task is known and not done."""
        return task in self._undone

    def add(self, tasks: Iterable[Task]) -> None:
        """Add tasks, in an order in which they could run one by one; what is unknown is done."""
        added = {task.id: _Undone(task) for task in tasks}
        self._undone |= added
        for one in added.values():
            for before in one.task.after:
                ahead = self._undone.get(before)
                if ahead is not None:
                    ahead.followers.append(one)
                    one.num_before += 1
            if one.task.leases:
                self._line_up(one)
        for one in added.values():
            if not one.num_before:
                self._look_at(one)

    def next_of(self, lane: Lane) -> Task | None:
        """The most urgent task of a lane that may run."""
        tasks = self._may_run[lane]
        return tasks[0][2].task if tasks else None

    def may_run(self, task: Task) -> bool:
        """Whether a task may run, whatever else its lane could run."""
        return self._undone[task.id].may_run

    def is_behind(self, task: Task) -> bool:
        """Whether something that a task comes after is not done."""
        return self._undone[task.id].num_before > 0

    def has_room(self, task: Task) -> bool:
        """Whether the pools have room for a task, whoever is next in line."""
        return all(line.free_bytes >= nbytes for line, nbytes in self._undone[task.id].wants)

    def free_bytes(self, pool: PoolName) -> int:
        """Bytes of a pool that nobody holds."""
        return self._lines[pool].free_bytes

    def start(self, task: Task) -> None:
        """A task leaves its lines and takes its bytes: one that may run, or the next of a settled
        order, whose edges prove its room whoever is next in line."""
        one, ready = self._undone[task.id], self._may_run[task.lane]
        one.may_run = False
        while ready and not ready[0][2].may_run:
            heapq.heappop(ready)
        for line, nbytes in one.wants:
            line.free_bytes -= nbytes
            line.tasks.remove(one)
            if line.tasks:
                self._look_at(line.tasks[0])

    def launch(self, task: Task) -> None:
        """The work of a task is queued on a device: tasks of its lane, whose work will be queued
        behind it, need not wait until it is done. It has started and needs nothing any more, so
        that nobody can wait for it in vain."""
        one = self._undone[task.id]
        behind = [follower for follower in one.followers if follower.task.lane is task.lane]
        one.followers = [follower for follower in one.followers if follower not in behind]
        for follower in behind:
            follower.num_before -= 1
            self._look_at(follower)

    def finish(self, task: Task) -> list[Task]:
        """A task is done and gives its bytes back; returns those it was the last one before."""
        one = self._undone.pop(task.id)
        for lease in task.returns:
            line = self._lines[lease.pool]
            line.free_bytes += lease.nbytes
            if line.tasks:
                self._look_at(line.tasks[0])
        freed = []
        for follower in one.followers:
            follower.num_before -= 1
            if not follower.num_before:
                freed.append(follower.task)
                self._look_at(follower)
        return freed

    def _line_up(self, one: _Undone) -> None:
        wanted: dict[PoolName, int] = {}
        for lease in one.task.leases:
            wanted[lease.pool] = wanted.get(lease.pool, 0) + lease.nbytes
        one.wants = [(self._lines[pool], nbytes) for pool, nbytes in wanted.items()]
        for line, _ in one.wants:
            line.tasks.append(one)

    def _look_at(self, one: _Undone) -> None:
        """Note that a task may run, from when it may."""
        if one.num_before or one.may_run:
            return
        for line, nbytes in one.wants:
            if line.tasks[0] is not one or line.free_bytes < nbytes:
                return
        one.may_run = True
        task = one.task
        heapq.heappush(self._may_run[task.lane], (task.priority, task.id, one))
