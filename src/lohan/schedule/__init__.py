"""Schedules: a plan spelled out as ordered tasks on lanes."""

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
