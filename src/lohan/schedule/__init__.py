"""Schedules: a plan spelled out as ordered tasks on lanes.

Owns tasks, what each waits for, and the checks of a list. Imported by the simulator and by all that
runs tasks. Never decides what lives where, and carries out nothing.
"""

from lohan.schedule.build import RollingSchedule, build_schedule
from lohan.schedule.check import check_schedule
from lohan.schedule.task import Compute, Lease, Move, Piece, Pool, Schedule, Task
from lohan.schedule.text import dump_schedule

__all__ = [
    "Compute",
    "Lease",
    "Move",
    "Piece",
    "Pool",
    "RollingSchedule",
    "Schedule",
    "Task",
    "build_schedule",
    "check_schedule",
    "dump_schedule",
]
