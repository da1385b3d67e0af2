"""The discrete-event core: lanes that run tasks, links they share, pools they lease from.

One core serves both uses: `settle` lets each lane take the task that `schedule.ready` names and
records the order; `simulate` replays a settled order. Progress is fluid: when two lanes share a
link, each runs at a share of its speed until the other is done. Owns the virtual clock, and whose
returned bytes a lease uses.
"""

from collections import deque
from dataclasses import dataclass, field

from lohan.errors import LohanError, bug
from lohan.hardware.machine import Machine
from lohan.plan.system import DrivingRates
from lohan.schedule.ready import Ready
from lohan.schedule.task import Schedule, Task
from lohan.simulate.durations import Durations
from lohan.vocabulary import Lane, PoolName, TaskId


@dataclass(slots=True)
class ClockResult:
    """When each task ran, and what was learnt about order and memory."""

    start_seconds: list[float]
    end_seconds: list[float]
    order: dict[Lane, list[TaskId]]
    edges: dict[TaskId, list[TaskId]]
    """For each task, the tasks whose returned bytes its leases used."""
    usage: list[tuple[float, PoolName, int]] = field(default_factory=list)
    """(time, pool, bytes in use) after each change."""


class _Credits:
    """Free bytes of a pool: each was free from the start or returned by a task."""

    __slots__ = ("credits", "in_use_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        self.in_use_bytes = 0
        self.credits: deque[tuple[TaskId | None, int]] = deque([(None, capacity_bytes)])

    def take(self, nbytes: int) -> list[TaskId]:
        """Use credits for a lease; returns the tasks that gave those bytes back."""
        self.in_use_bytes += nbytes
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
        self.in_use_bytes -= nbytes
        self.credits.append((giver, nbytes))


class Clock:
    """Runs a schedule on a virtual clock."""

    def __init__(
        self,
        schedule: Schedule,
        durations: Durations,
        machine: Machine,
        rates: DrivingRates,
    ) -> None:
        self._schedule = schedule
        self._tasks = schedule.tasks
        self._is_ssd_duplex = machine.ssd_path.is_duplex
        self._interference = rates.copy_interference
        self._shares_cores = machine.gpu.is_processor
        self._work = [durations.of(task) for task in self._tasks]
        self._ready = Ready(schedule.pools)
        self._ready.add(self._tasks)
        self._pools = {name: _Credits(pool.capacity_bytes) for name, pool in schedule.pools.items()}
        self._next = dict.fromkeys(schedule.lanes, 0)
        self._running: dict[Lane, Task] = {}
        self._left: dict[Lane, float] = {}
        count = len(self._tasks)
        self.result = ClockResult(
            [0.0] * count, [0.0] * count, {lane: [] for lane in schedule.lanes}, {}
        )

    def run(self, *, by_priority: bool, through_step: int | None = None) -> ClockResult:
        """Run every task to its end, or until those of a step and of all before it are done.

        Raises:
            ScheduleError: if no lane can go on before all tasks are done.
        """
        now, running = 0.0, self._running
        next_of = self._ready.next_of if by_priority else self._listed
        last = self._schedule.num_steps if through_step is None else through_step
        num_left = sum(task.step <= last for task in self._tasks)
        while num_left:
            for lane in self._next:
                if lane not in running:
                    task = next_of(lane)
                    if task is not None:
                        self._start(task, now)
            if not running:
                raise self._stuck()
            now += self._advance()
            finished = [
                lane
                for lane, left in self._left.items()
                # Rounding of the subtraction must not leave a sliver of a task behind.
                if left <= 1e-12 * (1.0 + self._work[running[lane].id])
            ]
            for lane in finished:
                task = running.pop(lane)
                self._finish(task, now)
                num_left -= task.step <= last
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

    def _listed(self, lane: Lane) -> Task | None:
        listed = self._schedule.lanes[lane]
        if self._next[lane] >= len(listed):
            return None
        task = self._tasks[listed[self._next[lane]]]
        if self._ready.is_behind(task):
            return None
        if not self._ready.has_room(task):
            raise bug(
                f"{task.name} of step {task.step} found no room in "
                f"{', '.join(lease.pool for lease in task.leases)}"
            )
        return task

    def _start(self, task: Task, now: float) -> None:
        self._next[task.lane] += 1
        self._running[task.lane] = task
        self._left[task.lane] = self._work[task.id]
        self.result.start_seconds[task.id] = now
        self.result.order[task.lane].append(task.id)
        self._ready.start(task)
        for lease in task.leases:
            pool = self._pools[lease.pool]
            givers = pool.take(lease.nbytes)
            if givers:
                self.result.edges.setdefault(task.id, []).extend(givers)
            self.result.usage.append((now, lease.pool, pool.in_use_bytes))

    def _finish(self, task: Task, now: float) -> None:
        del self._left[task.lane]
        self.result.end_seconds[task.id] = now
        for lease in task.returns:
            pool = self._pools[lease.pool]
            pool.give(lease.nbytes, task.id)
            self.result.usage.append((now, lease.pool, pool.in_use_bytes))
        self._ready.finish(task)

    def _speeds(self) -> dict[Lane, float]:
        """Speeds of running lanes that are not at their full one."""
        running = self._running
        speeds: dict[Lane, float] = {}
        if not self._is_ssd_duplex and Lane.SSD_READ in running and Lane.SSD_WRITE in running:
            # Simplex drives take turns: each direction has the drives half of the time.
            speeds[Lane.SSD_READ] = speeds[Lane.SSD_WRITE] = 0.5
        if self._shares_cores:
            if Lane.GPU in running and Lane.CPU in running:
                # One processor computes and updates, each on all cores: they take turns.
                speeds[Lane.GPU] = speeds[Lane.CPU] = 0.5
        elif self._interference and Lane.GPU in running:
            copies = (Lane.GPU_TO_RAM in running) + (Lane.RAM_TO_GPU in running)
            speeds[Lane.GPU] = 1.0 - self._interference * copies
        return speeds

    def _stuck(self) -> LohanError:
        total = len(self._tasks)
        waiting = [task for task in self._tasks if task.id in self._ready]
        first = next((task for task in waiting if not self._ready.is_behind(task)), waiting[0])
        pools = ", ".join(
            f"{lease.pool} ({self._ready.free_bytes(lease.pool)} of {lease.nbytes} bytes free)"
            for lease in first.leases
        )
        return bug(
            f"after {total - len(waiting)} of {total} tasks nothing can go on; first in line is "
            f"{first.name} of step {first.step} on {first.lane}"
            + (f", which leases from {pools}" if pools else "")
        )
