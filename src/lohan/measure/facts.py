"""Which hardware this is: what a profile belongs to, so that another box never uses it.

Owns the facts and where they are read: processor, cores, memory, the device's own name, and the
drive behind each directory. No host name, no serial number. Measures nothing.
"""

import os
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from lohan.device import Device, EmulatedDevice, EmulatedRates
from lohan.hardware import this_host
from lohan.ssd import DirectoryReport


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveFacts:
    """What a directory lies on."""

    device: str
    """As mounted, such as `/dev/nvme0n1p2`."""
    model: str
    """As the drive calls itself; empty where it does not."""
    filesystem: str
    total_bytes: int

    @property
    def name(self) -> str:
        """For people."""
        return self.model or self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What a profile was measured on."""

    cpu_model: str
    num_cores: int
    """That this process may use."""
    ram_total_bytes: int
    device: str
    """Kind of device, such as `cpu` or `cuda:0`."""
    device_hardware: str
    drives: tuple[DriveFacts, ...]


def machine_facts(
    device: Device, reports: Sequence[DirectoryReport], *, root: str | pathlib.Path = "/"
) -> MachineFacts:
    """Ask the system what it is; `root` is where `proc` and `sys` are mounted."""
    root = pathlib.Path(root)
    cpu_model = this_host.cpu_model(root)
    return MachineFacts(
        cpu_model=cpu_model,
        num_cores=this_host.num_usable_cores(),
        ram_total_bytes=this_host.ram_total_bytes(root),
        device=device.name,
        device_hardware=_hardware_of(device) or cpu_model,
        drives=tuple(_drive_of(report, root) for report in reports),
    )


def _hardware_of(device: Device) -> str | None:
    if isinstance(device, EmulatedDevice) and device.rates != EmulatedRates():
        rates = (getattr(device.rates, one.name) for one in fields(EmulatedRates))
        return "emulation at " + " ".join("-" if rate is None else f"{rate:.3g}" for rate in rates)
    module = torch.get_device_module(device.torch_device)
    name = getattr(module, "get_device_name", None)
    return str(name(device.torch_device)) if name is not None else None


def _drive_of(report: DirectoryReport, root: pathlib.Path) -> DriveFacts:
    number = f"{os.major(report.device)}:{os.minor(report.device)}"
    return DriveFacts(
        device=_mounted_from(number, root) or number,
        model=_model_of(number, root),
        filesystem=report.filesystem,
        total_bytes=report.total_bytes,
    )


def _mounted_from(number: str, root: pathlib.Path) -> str:
    for line in this_host.text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split(" ")[2:3] == [number]:
            return after.split(" ")[1]
    return ""


def _model_of(number: str, root: pathlib.Path) -> str:
    """What the drive calls itself; a partition asks the drive it is on."""
    there = root / "sys/dev/block" / number
    for path in (there / "device/model", there / ".." / "device/model"):
        text = " ".join(this_host.text_of(path).split())
        if text:
            return text
    return ""
