"""What a machine can do: facts with JSON in and out, and machines by name."""

from lohan.hardware.machine import Gpu, Machine, Ssd, SsdPath
from lohan.hardware.presets import MACHINE_NAMES, machine_from, machine_named

__all__ = ["MACHINE_NAMES", "Gpu", "Machine", "Ssd", "SsdPath", "machine_from", "machine_named"]
