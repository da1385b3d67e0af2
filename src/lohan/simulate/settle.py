"""Fixes the order of every lane: runs the tasks once by priority and writes down what happened.

A replay keeps to the recorded order; the engine does not, its lanes choose anew by the same rule
(`schedule.ready`). Each lease gets an edge from the tasks whose returned bytes it uses, so room in
a pool follows from the order alone.
"""

from lohan.hardware.machine import Machine
from lohan.plan.system import DrivingRates
from lohan.schedule.task import Schedule
from lohan.simulate.clock import Clock, ClockResult
from lohan.simulate.durations import Durations


def settle(schedule: Schedule, machine: Machine, rates: DrivingRates) -> Schedule:
    """The same tasks in the order a run at the machine's rates takes them.

    Raises:
        ScheduleError: if the tasks cannot all run.
    """
    return settle_and_time(schedule, machine, rates, Durations(machine, rates))[0]


def settle_and_time(
    schedule: Schedule, machine: Machine, rates: DrivingRates, durations: Durations
) -> tuple[Schedule, ClockResult]:
    """The settled schedule and when its tasks ran: a replay of it gives the same times.

    Raises:
        ScheduleError: if the tasks cannot all run.
    """
    clock = Clock(
        schedule,
        durations,
        is_ssd_duplex=machine.ssd_path.is_duplex,
        copy_interference=rates.copy_interference,
    )
    result = clock.run(by_priority=True)
    settled = schedule.with_order(
        {lane: tuple(ids) for lane, ids in result.order.items()},
        {task: tuple(givers) for task, givers in result.edges.items()},
    )
    return settled, result
