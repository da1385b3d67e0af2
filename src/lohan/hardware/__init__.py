"""What a machine can do: facts with JSON in and out, machines by name, and what RAM is free.

Owns `Machine` and its file. Imported by all that plans or measures. Never measures: `measure` does.
"""

from lohan.hardware.limits import AvailableRam
from lohan.hardware.machine import Gpu, Machine, Ssd, SsdPath
from lohan.hardware.presets import MACHINE_NAMES, machine_from, machine_named

__all__ = [
    "MACHINE_NAMES",
    "AvailableRam",
    "Gpu",
    "Machine",
    "Ssd",
    "SsdPath",
    "machine_from",
    "machine_named",
]
