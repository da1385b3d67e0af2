"""The GPU tier: its memory, its two copy lanes, its compute queue.

`open_device` picks one of three implementations of the `Device` contract (see `device.py`). The
rest of the code base names no kind of device: it asks this folder for one.
"""

from lohan.device.cpu import CpuDevice
from lohan.device.device import Device, Event
from lohan.device.emulated import EmulatedDevice, EmulatedRates
from lohan.device.memory import DeviceMemory
from lohan.device.open import open_device, torch_device_named

__all__ = [
    "CpuDevice",
    "Device",
    "DeviceMemory",
    "EmulatedDevice",
    "EmulatedRates",
    "Event",
    "open_device",
    "torch_device_named",
]
