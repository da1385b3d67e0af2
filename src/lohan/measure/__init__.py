"""Fill in a Machine by measurement: drives, copies, compute, updates, memory that is free.

Owns what is run and timed, for how long, and the kept profile. Imported by `attaching`, `doctor`
and the commands. Never plans, and leaves no file but the profile.
"""

from lohan.hardware.this_host import cache_directory
from lohan.measure.bar import measuring_bar
from lohan.measure.cache import (
    MOST_AGE,
    LoadedProfile,
    load_profile,
    profile_path,
    save_profile,
)
from lohan.measure.facts import DriveFacts, MachineFacts, machine_facts
from lohan.measure.figure import Figure
from lohan.measure.machine import Instruments, Sizes, measure_machine
from lohan.measure.measured import MeasuredDrive, MeasuredMachine, Part
from lohan.measure.profile import profile_machine

__all__ = [
    "MOST_AGE",
    "DriveFacts",
    "Figure",
    "Instruments",
    "LoadedProfile",
    "MachineFacts",
    "MeasuredDrive",
    "MeasuredMachine",
    "Part",
    "Sizes",
    "cache_directory",
    "load_profile",
    "machine_facts",
    "measure_machine",
    "measuring_bar",
    "profile_machine",
    "profile_path",
    "save_profile",
]
