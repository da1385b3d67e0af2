"""What a Machine takes from what was measured, and from what is free now.

Owns rates of drives that were not measured, the ceilings of the path they share, free space, and
how main memory is shared with a device that has none of its own. Called by `machine`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from lohan.device import Device
from lohan.errors import DoesNotFit
from lohan.hardware.drive_life import DriveWear, life_of, read_wear
from lohan.hardware.limits import AvailableRam, available_ram_bytes, is_bound_by_locking
from lohan.hardware.machine import Ssd, SsdPath
from lohan.hardware.presets import machine_named
from lohan.measure.disks import DriveFigures
from lohan.measure.facts import MachineFacts
from lohan.measure.figure import Figure
from lohan.measure.measured import MeasuredDrive
from lohan.ssd import DirectoryReport
from lohan.units import MIB, format_bytes

_BOUND_SHARE = 0.9
_LEAST_BYTES = 64 * MIB


def with_room(ssds: Sequence[Ssd], reports: Sequence[DirectoryReport]) -> tuple[Ssd, ...]:
    """The drives with the space that is free now, shared by directories on one filesystem."""
    num_on = Counter(report.device for report in reports)
    return tuple(
        replace(ssd, capacity_bytes=max(1, report.free_bytes // num_on[report.device]))
        for ssd, report in zip(ssds, reports, strict=True)
    )


def ssds_of(
    drives: Sequence[MeasuredDrive],
    facts: MachineFacts,
    ask_wear: Callable[[str], DriveWear | None] = read_wear,
) -> list[Ssd]:
    """The drives as measured; with the rates of usual ones where they were not.

    Directories on one drive share its life. `ask_wear` gives what a drive says of itself.
    """
    num_on = Counter(one.device for one in facts.drives)
    wears = {device: ask_wear(device) for device in num_on}
    lives = {one.device: life_of(one.total_bytes, wears[one.device]) for one in facts.drives}
    desktop = machine_named("desktop-4090").ssds[0]
    usual = desktop.read_bytes_per_second, desktop.write_bytes_per_second
    measured = [(drive.figures.read.per_second, drive.lasting_write_per_second) for drive in drives]
    return [
        Ssd(
            name=one.name,
            read_bytes_per_second=read,
            write_bytes_per_second=write,
            capacity_bytes=max(1, one.total_bytes),
            endurance_bytes=max(1, lives[one.device][0] // num_on[one.device]),
            price_dollars=0,
            life=lives[one.device][1],
            used_share=None if (wear := wears[one.device]) is None else wear.used_share,
        )
        for one, (read, write) in zip(
            facts.drives, measured or [usual] * len(facts.drives), strict=True
        )
    ]


def path_of(
    drives: Sequence[MeasuredDrive], together: DriveFigures | None, ram_copies: Figure
) -> SsdPath:
    """What the drives share. A ceiling that was not seen is put where main memory itself ends."""
    reads = sum(drive.figures.read.per_second for drive in drives)
    writes = sum(drive.figures.write.per_second for drive in drives)

    def ceiling(seen_per_second: float, drives_per_second: float) -> float:
        if seen_per_second < _BOUND_SHARE * drives_per_second:
            return seen_per_second
        return max(ram_copies.per_second, drives_per_second)

    return SsdPath(
        is_duplex=together is None or together.is_duplex,
        read_ceiling_bytes_per_second=ceiling(together.read.per_second if together else 0, reads),
        write_ceiling_bytes_per_second=ceiling(
            together.write.per_second if together else 0, writes
        ),
    )


def memory_to_plan_with(
    device: Device,
    ram_bytes: int | None,
    gpu_bytes: int | None,
    *,
    available: AvailableRam | None = None,
) -> tuple[int, int, str]:
    """RAM and GPU bytes to plan with, and what bounds the RAM.

    A device without memory of its own takes its part of main memory: half, unless told otherwise.
    `available` is what may still be taken; asked from the system if not given.

    Raises:
        DoesNotFit: hardly anything is left.
    """
    if available is None:
        available = available_ram_bytes(counts_locked=is_bound_by_locking(device))
    gpu = gpu_bytes or device.memory_bytes
    is_main_memory = device.torch_device.type == "cpu"
    if gpu is None:
        gpu = available.bytes - ram_bytes if ram_bytes is not None else available.bytes // 2
    if ram_bytes is not None:
        ram, why = ram_bytes, "as asked for"
    elif is_main_memory:
        ram = available.bytes - gpu
        why = f"{available.reason}; {format_bytes(gpu)} of it stand in for GPU memory"
    else:
        ram, why = available.bytes, available.reason
    if min(ram, gpu) < _LEAST_BYTES:
        raise DoesNotFit(
            f"{format_bytes(max(0, ram))} of RAM and {format_bytes(max(0, gpu))} of GPU memory "
            "are left",
            why=f"nothing can be trained with so little; {available.reason}",
            remedy="close what else uses memory, raise the limit, or give other budgets",
        )
    return ram, gpu, why
