"""An obvious, slow and exact clock: the judge of `lohan.simulate.clock`.

Works in fractions, so nothing is rounded. At every event it looks at every lane again: the first
unfinished task of a lane runs if everything it comes after is finished. No heaps, no counters, no
pools: a settled schedule must not need them.
"""

from collections.abc import Callable
from fractions import Fraction

from lohan.schedule import Schedule, Task
from lohan.vocabulary import Lane, TaskId


def exact_times(
    schedule: Schedule,
    seconds: Callable[[Task], float],
    *,
    is_ssd_duplex: bool,
    copy_interference: float,
    shares_cores: bool,
) -> tuple[dict[TaskId, Fraction], dict[TaskId, Fraction]]:
    """Start and end of every task of a settled schedule."""
    left = {task.id: Fraction(seconds(task)) for task in schedule.tasks}
    starts: dict[TaskId, Fraction] = {}
    ends: dict[TaskId, Fraction] = {}
    now = Fraction(0)
    while len(ends) < len(schedule.tasks):
        running: dict[Lane, TaskId] = {}
        for lane, listed in schedule.lanes.items():
            unfinished = [task for task in listed if task not in ends]
            if unfinished and all(before in ends for before in schedule.task(unfinished[0]).after):
                running[lane] = unfinished[0]
                starts.setdefault(unfinished[0], now)
        assert running, "the schedule hangs"
        speeds = {lane: Fraction(1) for lane in running}
        if not is_ssd_duplex and {Lane.SSD_READ, Lane.SSD_WRITE} <= running.keys():
            speeds[Lane.SSD_READ] = speeds[Lane.SSD_WRITE] = Fraction(1, 2)
        if shares_cores:
            if {Lane.GPU, Lane.CPU} <= running.keys():
                speeds[Lane.GPU] = speeds[Lane.CPU] = Fraction(1, 2)
        elif Lane.GPU in running:
            copies = sum(lane in running for lane in (Lane.GPU_TO_RAM, Lane.RAM_TO_GPU))
            speeds[Lane.GPU] -= Fraction(copy_interference) * copies
        passed = min(left[task] / speeds[lane] for lane, task in running.items())
        now += passed
        for lane, task in running.items():
            left[task] -= passed * speeds[lane]
            if left[task] == 0:
                ends[task] = now
    return starts, ends
