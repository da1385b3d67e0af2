"""A profile made by hand, and a quick way to measure this machine."""

import math
import pathlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from typing import Any

from lohan.measure import (
    DriveFacts,
    Figure,
    Instruments,
    MachineFacts,
    MeasuredDrive,
    MeasuredMachine,
    Sizes,
    profile_machine,
    save_profile,
)
from lohan.measure.compute import ComputeFigures
from lohan.measure.copies import CopyFigures
from lohan.measure.disks import DriveFigures
from lohan.ssd import DriveSettings, IoEngine, Mixing, choose_engine
from lohan.units import GIB, MIB
from support.hand_made import machine

MEASURED_AT = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def figure(per_second: float) -> Figure:
    return Figure(samples=(per_second, 0.9 * per_second, 1.1 * per_second))


def drive(
    path: str, *, read: float = 4e9, write: float = 2e9, lasting: float = 1e9
) -> MeasuredDrive:
    return MeasuredDrive(
        path=path,
        figures=DriveFigures(read=figure(read), write=figure(write), mixed=figure(3e9)),
        sustained_write=figure(lasting),
        settings=DriveSettings(block_bytes=MIB, max_requests=32, mixing=Mixing.SIMPLEX),
    )


def profile(**changes: Any) -> MeasuredMachine:
    facts = MachineFacts(
        cpu_model="Fast One",
        num_cores=8,
        ram_total_bytes=64 * GIB,
        device="cuda:0",
        device_hardware="Big GPU",
        drives=(DriveFacts(device="/dev/a", model="SSD", filesystem="xfs", total_bytes=10**12),)
        * 2,
    )
    made = MeasuredMachine(
        machine=machine(),
        measured_at=MEASURED_AT,
        lohan_version="0.1",
        seconds=0.5,
        sustained_seconds=3.0,
        facts=facts,
        io_engine="io_uring",
        drives=(drive("/mnt/a"), drive("/mnt/b", write=1e9, lasting=0.5e9)),
        together=DriveFigures(read=figure(8e9), write=figure(3e9), mixed=figure(6e9)),
        copies=CopyFigures(
            ram_to_gpu=figure(2e10),
            gpu_to_ram=figure(1e10),
            both_ways_slowdown=1.25,
            is_pinned=True,
        ),
        ram_copies=figure(5e10),
        compute=ComputeFigures(flops=figure(1e14), memory=figure(1e12), tokens=1024, width=2048),
        updates=figure(2e9),
        num_update_threads=8,
        ram_reason="48 GiB are free",
        notes=("beware",),
        written_bytes=10**10,
    )
    return replace(made, **changes)


def quick_instruments(make_engine: Callable[[], IoEngine] | None = None) -> Instruments:
    """Real ones, on small things."""
    return Instruments(
        make_engine=make_engine or (lambda: choose_engine()[0]),
        sizes=Sizes(
            most_written_bytes=32 * MIB,
            least_file_bytes=MIB,
            request_bytes=MIB,
            copy_bytes=MIB,
            memory_piece_bytes=MIB,
            blocks=((8, 64),),
            num_parameters=2**16,
        ),
        most_spread=math.inf,
    )


def quick_options(root: pathlib.Path) -> dict[str, Any]:
    """What keeps a real measurement short."""
    return {
        "ssd": [root],
        "device": "cpu",
        "seconds": 1e-3,
        "sustained_seconds": 1e-3,
        "num_threads": 1,
    }


def keep_quick_profile(cache_home: pathlib.Path, ssd: list[pathlib.Path]) -> None:
    """Measure this machine hastily for these directories, and keep it below XDG_CACHE_HOME: what
    is attached there then starts at once."""
    options = {**quick_options(ssd[0]), "ssd": ssd, "num_threads": None}
    found, _ = profile_machine(
        **options, instruments=quick_instruments(), cache=cache_home / "lohan"
    )
    save_profile(steady(found), directory=cache_home / "lohan")


def steady(found: Any) -> Any:
    """The same record, each figure in it as if all its samples had agreed."""
    if isinstance(found, Figure):
        return Figure(samples=(found.per_second,) * len(found.samples))
    if isinstance(found, tuple):
        return tuple(steady(one) for one in found)
    if is_dataclass(found) and type(found).__module__.startswith("lohan.measure"):
        return replace(
            found, **{one.name: steady(getattr(found, one.name)) for one in fields(found)}
        )
    return found
