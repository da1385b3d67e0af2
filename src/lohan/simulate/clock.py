"""The discrete-event core: lanes that run tasks, links they share, pools they lease from.

One core serves both uses: `settle` lets each lane pick its next task by priority, as far as each
pool's turn allows, and records the order; `simulate` replays a settled order. Progress is fluid:
when two lanes share a link, each runs at a share of its speed until the other is done. Owns the
virtual clock and nothing else.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field

from lohan.errors import ScheduleError
from lohan.schedule.task import Schedule, Task
from lohan.simulate.durations import Durations
from lohan.vocabulary import Lane, TaskId


@dataclass(slots=True)
class ClockResult:
    """When each task ran, and what was learnt about order and memory."""

    start_seconds: list[float]
    end_seconds: list[float]
    order: dict[Lane, list[TaskId]]
    edges: dict[TaskId, list[TaskId]]
    """For each task, the tasks whose returned bytes its leases used."""
    usage: list[tuple[float, str, int]] = field(default_factory=list)
    """(time, pool, bytes in use) after each change."""


class _PoolState:
    """Bytes of a pool as credits: each was free from the start or returned by a task."""

    __slots__ = ("capacity", "credits", "free", "name")

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name, self.capacity, self.free = name, capacity_bytes, capacity_bytes
        self.credits: deque[tuple[TaskId | None, int]] = deque([(None, capacity_bytes)])

    def take(self, nbytes: int) -> list[TaskId]:
        """Use credits for a lease; returns the tasks that gave those bytes back."""
        self.free -= nbytes
        givers = []
        while nbytes:
            giver, available = self.credits.popleft()
            used = min(available, nbytes)
            nbytes -= used
            if giver is not None:
                givers.append(giver)
            if available > used:
                self.credits.appendleft((giver, available - used))
        return givers

    def give(self, nbytes: int, giver: TaskId) -> None:
        self.free += nbytes
        self.credits.append((giver, nbytes))


class Clock:
    """Runs a schedule on a virtual clock."""

    def __init__(
        self,
        schedule: Schedule,
        durations: Durations,
        *,
        is_ssd_duplex: bool,
        copy_interference: float,
    ) -> None:
        self._schedule = schedule
        self._tasks = schedule.tasks
        self._is_ssd_duplex = is_ssd_duplex
        self._interference = copy_interference
        self._work = [durations.of(task) for task in self._tasks]
        self._pools = {
            name: _PoolState(name, pool.capacity_bytes) for name, pool in schedule.pools.items()
        }
        self._waiting_for = [len(task.after) for task in self._tasks]
        self._followers: list[list[TaskId]] = [[] for _ in self._tasks]
        for task in self._tasks:
            for before in task.after:
                self._followers[before].append(task.id)
        # Ready tasks that lease nothing, per lane.
        self._free: dict[Lane, list[tuple[tuple[int, ...], TaskId]]] = {lane: [] for lane in Lane}
        self._is_ready = [False] * len(self._tasks)
        # Each pool grants in the order of the list, so that nothing can hang (see `task`): its
        # next lessee, and for each lane the pools it leases from.
        self._lessees: dict[str, list[TaskId]] = {name: [] for name in schedule.pools}
        self._granted = dict.fromkeys(schedule.pools, 0)
        self._pools_of: dict[Lane, dict[str, None]] = {lane: {} for lane in Lane}
        for task in self._tasks:
            for lease in task.leases:
                lessees = self._lessees[lease.pool]
                if not lessees or lessees[-1] != task.id:
                    lessees.append(task.id)
                self._pools_of[task.lane][lease.pool] = None
        self._lanes_of: dict[str, list[Lane]] = {name: [] for name in schedule.pools}
        for lane, pools in self._pools_of.items():
            for name in pools:
                self._lanes_of[name].append(lane)
        # Lanes for which something has changed since they found nothing to start.
        self._stirred = set(schedule.lanes)
        self._next = dict.fromkeys(schedule.lanes, 0)
        self._running: dict[Lane, TaskId] = {}
        self._left: dict[Lane, float] = {}
        count = len(self._tasks)
        self.result = ClockResult(
            [0.0] * count, [0.0] * count, {lane: [] for lane in schedule.lanes}, {}
        )

    def run(self, *, by_priority: bool) -> ClockResult:
        """Run every task to its end.

        Raises:
            ScheduleError: if no lane can go on before all tasks are done.
        """
        for task in self._tasks:
            if not self._waiting_for[task.id]:
                self._make_ready(task)
        now, done = 0.0, 0
        total = len(self._tasks)
        while done < total:
            self._start_all(now, by_priority)
            if not self._running:
                raise self._stuck(done)
            step = self._advance()
            now += step
            finished = [
                lane
                for lane, left in self._left.items()
                # Rounding of the subtraction must not leave a sliver of a task behind.
                if left <= 1e-12 * (1.0 + self._work[self._running[lane]])
            ]
            for lane in finished:
                self._finish(lane, now)
                done += 1
        return self.result

    def _advance(self) -> float:
        """Let every running task go on until the first one ends; returns the seconds."""
        left = self._left
        speeds = self._speeds()
        if not speeds:
            step = min(left.values())
            for lane in left:
                left[lane] -= step
            return step
        step = min(work / speeds.get(lane, 1.0) for lane, work in left.items())
        for lane in left:
            left[lane] -= step * speeds.get(lane, 1.0)
        return step

    def _make_ready(self, task: Task) -> None:
        self._is_ready[task.id] = True
        self._stirred.add(task.lane)
        if not task.leases:
            heapq.heappush(self._free[task.lane], (task.priority, task.id))

    def _fits(self, task: Task) -> bool:
        if len(task.leases) == 1:
            lease = task.leases[0]
            return self._pools[lease.pool].free >= lease.nbytes
        wanted: dict[str, int] = {}
        for lease in task.leases:
            wanted[lease.pool] = wanted.get(lease.pool, 0) + lease.nbytes
        return all(self._pools[pool].free >= nbytes for pool, nbytes in wanted.items())

    def _start_all(self, now: float, by_priority: bool) -> None:
        for lane in self._next:
            if lane in self._running or lane not in self._stirred:
                continue
            self._stirred.discard(lane)
            task = self._pick(lane) if by_priority else self._listed(lane)
            if task is not None:
                self._start(task, now)

    def _pick(self, lane: Lane) -> Task | None:
        free = self._free[lane]
        best = self._tasks[free[0][1]] if free else None
        for pool in self._pools_of[lane]:
            lessees, granted = self._lessees[pool], self._granted[pool]
            if granted == len(lessees):
                continue
            task = self._tasks[lessees[granted]]
            if task.lane is not lane or not self._is_ready[task.id]:
                continue
            if (
                (best is None or task.priority < best.priority)
                and self._is_next_everywhere(task)
                and self._fits(task)
            ):
                best = task
        if best is not None and not best.leases:
            heapq.heappop(free)
        return best

    def _is_next_everywhere(self, task: Task) -> bool:
        return len(task.leases) == 1 or all(
            self._lessees[lease.pool][self._granted[lease.pool]] == task.id for lease in task.leases
        )

    def _listed(self, lane: Lane) -> Task | None:
        listed = self._schedule.lanes[lane]
        if self._next[lane] >= len(listed):
            return None
        task = self._tasks[listed[self._next[lane]]]
        if self._waiting_for[task.id]:
            return None
        if not self._fits(task):
            raise ScheduleError(
                f"{task.name} of step {task.step} found no room in "
                f"{', '.join(lease.pool for lease in task.leases)}",
                why="a lease must never wait: its order does not prove the pool",
                remedy="report this schedule; it is a mistake of the builder",
            )
        return task

    def _start(self, task: Task, now: float) -> None:
        self._next[task.lane] += 1
        self._running[task.lane] = task.id
        self._left[task.lane] = self._work[task.id]
        self.result.start_seconds[task.id] = now
        self.result.order[task.lane].append(task.id)
        if not task.leases:
            return
        for pool_name in {lease.pool for lease in task.leases}:
            self._granted[pool_name] += 1
            self._stirred.update(self._lanes_of[pool_name])
        for lease in task.leases:
            pool = self._pools[lease.pool]
            givers = pool.take(lease.nbytes)
            if givers:
                self.result.edges.setdefault(task.id, []).extend(givers)
            self.result.usage.append((now, lease.pool, pool.capacity - pool.free))

    def _finish(self, lane: Lane, now: float) -> None:
        task = self._tasks[self._running.pop(lane)]
        del self._left[lane]
        self._stirred.add(lane)
        self.result.end_seconds[task.id] = now
        for lease in task.returns:
            pool = self._pools[lease.pool]
            pool.give(lease.nbytes, task.id)
            self._stirred.update(self._lanes_of[lease.pool])
            self.result.usage.append((now, lease.pool, pool.capacity - pool.free))
        for follower in self._followers[task.id]:
            self._waiting_for[follower] -= 1
            if not self._waiting_for[follower]:
                self._make_ready(self._tasks[follower])

    def _speeds(self) -> dict[Lane, float]:
        """Speeds of running lanes that are not at their full one."""
        running = self._running
        speeds: dict[Lane, float] = {}
        if not self._is_ssd_duplex and Lane.SSD_READ in running and Lane.SSD_WRITE in running:
            # Simplex drives take turns: each direction has the drives half of the time.
            speeds[Lane.SSD_READ] = speeds[Lane.SSD_WRITE] = 0.5
        if self._interference and Lane.GPU in running:
            copies = (Lane.GPU_TO_RAM in running) + (Lane.RAM_TO_GPU in running)
            speeds[Lane.GPU] = 1.0 - self._interference * copies
        return speeds

    def _stuck(self, done: int) -> ScheduleError:
        waiting = [task for task in self._tasks if self.result.end_seconds[task.id] == 0.0]
        first = next((task for task in waiting if not self._waiting_for[task.id]), waiting[0])
        pools = ", ".join(
            f"{lease.pool} ({self._pools[lease.pool].free} of {lease.nbytes} bytes free)"
            for lease in first.leases
        )
        return ScheduleError(
            f"after {done} of {len(self._tasks)} tasks nothing can go on; first in line is "
            f"{first.name} of step {first.step} on {first.lane}"
            + (f", which leases from {pools}" if pools else ""),
            why="the schedule has a cycle or a pool that is too small",
            remedy="report this schedule; it is a mistake of the builder",
        )
