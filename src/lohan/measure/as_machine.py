"""What a Machine takes from each measured figure.

Owns rates of drives that were not measured, the ceilings of the path they share, and free space.
Called by `machine`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from lohan.hardware.drive_life import DriveWear, life_of, read_wear
from lohan.hardware.machine import Gpu, Ssd, SsdPath
from lohan.hardware.presets import CONSUMER_GEN4
from lohan.measure.compute import ComputeFigures
from lohan.measure.disks import DriveFigures
from lohan.measure.facts import MachineFacts
from lohan.measure.figure import Figure
from lohan.measure.measured import MeasuredDrive
from lohan.ssd import DirectoryReport

_BOUND_SHARE = 0.9


def with_room(ssds: Sequence[Ssd], reports: Sequence[DirectoryReport]) -> tuple[Ssd, ...]:
    """The drives with the space that is free now, shared by directories on one filesystem."""
    num_on = Counter(report.device for report in reports)
    return tuple(
        replace(ssd, capacity_bytes=max(1, report.free_bytes // num_on[report.device]))
        for ssd, report in zip(ssds, reports, strict=True)
    )


def gpu_of(
    facts: MachineFacts, memory_bytes: int, compute: ComputeFigures, *, is_processor: bool
) -> Gpu:
    """What computes."""
    return Gpu(
        name=facts.device_hardware,
        memory_bytes=memory_bytes,
        flops_per_second=compute.flops.per_second,
        memory_bytes_per_second=compute.memory.per_second,
        price_dollars=0,
        is_processor=is_processor,
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
    usual = CONSUMER_GEN4.read_bytes_per_second, CONSUMER_GEN4.write_bytes_per_second
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
