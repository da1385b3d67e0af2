"""MeasuredMachine: a Machine with where its numbers come from, and its JSON form (version 2).

Owns the record: date, figures with their spread, what was chosen for each drive. Measures nothing
(`machine.py`) and stores nothing (`cache.py`). Read by `lohan profile`, and by whoever lays out
files over several drives.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Self

from lohan.errors import ConfigError
from lohan.fields import Fields, check_version, parse_object
from lohan.hardware.machine import Machine
from lohan.measure.compute import ComputeFigures
from lohan.measure.copies import CopyFigures
from lohan.measure.disks import DriveFigures
from lohan.measure.facts import DriveFacts, MachineFacts
from lohan.measure.figure import MOST_SPREAD, Figure
from lohan.ssd import DriveSettings, Mixing

FORMAT_VERSION = 2
_LEARNED = "drives varied a lot when they were measured: their rates are those a run has reached"


class Part(StrEnum):
    """What is measured, and remembered, on its own."""

    DRIVES = "drives"
    COPIES = "copies"
    COMPUTE = "compute"
    UPDATES = "updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDrive:
    """One SSD directory."""

    path: str
    figures: DriveFigures
    """Of this directory alone."""
    sustained_write: Figure | None
    """The end of a long write, if one was asked for: below the burst once a drive's fast cache is
    full."""
    settings: DriveSettings
    """Block size, queue depth and mixing that suit it best."""

    @property
    def lasting_write_per_second(self) -> float:
        """What to plan with: the lower of burst and sustained, as far as it is known."""
        burst = self.figures.write.per_second
        sustained = self.sustained_write
        return burst if sustained is None else min(burst, sustained.per_second)

    @property
    def weight(self) -> float:
        """Its share of striped bytes, which are read and written: bytes per second of both."""
        read, write = self.figures.read.per_second, self.lasting_write_per_second
        return 1 / (1 / read + 1 / write)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """A machine as it was measured."""

    machine: Machine
    measured_at: datetime
    """In UTC."""
    lohan_version: str
    seconds: float
    """Of one sample."""
    sustained_seconds: float | None
    facts: MachineFacts
    io_engine: str
    drives: tuple[MeasuredDrive, ...]
    """None where nothing moves to them: then the machine has usual ones."""
    together: DriveFigures | None
    """All directories at once."""
    copies: CopyFigures
    ram_copies: Figure
    """Of one thread, within main memory."""
    compute: ComputeFigures
    updates: Figure
    """Parameters per second."""
    num_update_threads: int
    ram_reason: str
    """What bounds `machine.ram_bytes`, in words."""
    notes: tuple[str, ...] = ()
    """What else the user should know."""
    written_bytes: int = 0
    """What measuring wrote to the drives."""
    written_now_bytes: int = 0
    """As much of it as was written just now, not when a kept profile was made. Not kept itself."""

    def __post_init__(self) -> None:
        assert len(self.drives) == (len(self.facts.drives) if self.together else 0), "all or none"

    def unsure_parts(self, most_spread: float = MOST_SPREAD) -> frozenset[Part]:
        """Parts some of whose samples lie too far apart to be remembered, or that have none."""
        drives = [self.together, *(drive.figures for drive in self.drives)]
        figures = {
            Part.DRIVES: [one for found in drives if found for one in (found.read, found.write)],
            Part.COPIES: [self.copies.ram_to_gpu, self.copies.gpu_to_ram],
            Part.COMPUTE: [self.compute.flops],
            Part.UPDATES: [self.updates],
        }
        return frozenset(
            part
            for part, found in figures.items()
            if not found or any(one.spread > most_spread for one in found)
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """Shares of the directories in a striped file."""
        return tuple(drive.weight for drive in self.drives)

    @property
    def settings(self) -> tuple[DriveSettings, ...]:
        """Settings of the directories' queues."""
        return tuple(drive.settings for drive in self.drives)

    def age(self, now: datetime) -> timedelta:
        """How old the figures are."""
        return now - self.measured_at

    @property
    def is_burst(self) -> bool:
        """Whether the write rate is one that drives may not hold for long."""
        return any(drive.sustained_write is None for drive in self.drives)

    def with_learned_drives(self, learned: Machine) -> Self:
        """The same with drives as fast as the steps of a run have shown them, which is remembered.

        Args:
            learned: a machine with the same drives, in the same order.
        """
        drives = tuple(
            replace(
                drive,
                figures=_learned(drive.figures, ssd.read_bytes_per_second, write),
                sustained_write=drive.sustained_write and Figure(samples=(write,)),
            )
            for drive, ssd in zip(self.drives, learned.ssds, strict=True)
            for write in (ssd.write_bytes_per_second,)
        )
        together = self.together and _learned(
            self.together, learned.ssd_read_bytes_per_second, learned.ssd_write_bytes_per_second
        )
        notes = tuple(dict.fromkeys((*self.notes, _LEARNED)))
        return replace(self, drives=drives, together=together, notes=notes)

    def to_fields(self) -> dict[str, object]:
        """Everything as plain values."""
        return {
            "version": FORMAT_VERSION,
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
            "lohan_version": self.lohan_version,
            "seconds": self.seconds,
            "sustained_seconds": self.sustained_seconds,
            "machine": json.loads(self.machine.to_json()),
            "facts": facts_fields(self.facts),
            "io_engine": self.io_engine,
            "drives": [
                {
                    "path": drive.path,
                    **_drive_figures_fields(drive.figures),
                    "sustained_write": drive.sustained_write
                    and _figure_fields(drive.sustained_write),
                    "weight": drive.weight,
                    "settings": _settings_fields(drive.settings),
                }
                for drive in self.drives
            ],
            "together": self.together and _drive_figures_fields(self.together),
            "copies": {
                "ram_to_gpu": _figure_fields(self.copies.ram_to_gpu),
                "gpu_to_ram": _figure_fields(self.copies.gpu_to_ram),
                "both_ways_slowdown": self.copies.both_ways_slowdown,
                "is_pinned": self.copies.is_pinned,
            },
            "ram_copies": _figure_fields(self.ram_copies),
            "compute": {
                "flops": _figure_fields(self.compute.flops),
                "memory": _figure_fields(self.compute.memory),
                "tokens": self.compute.tokens,
                "width": self.compute.width,
            },
            "updates": _figure_fields(self.updates),
            "num_update_threads": self.num_update_threads,
            "ram_reason": self.ram_reason,
            "notes": list(self.notes),
            "written_bytes": self.written_bytes,
        }

    def to_json(self) -> str:
        """Return it as JSON text."""
        return json.dumps(self.to_fields(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "profile") -> Self:
        """Return what a JSON text holds; `where` begins the messages.

        Raises:
            ConfigError: the text is no profile of this version.
        """
        found = parse_object(text, where=where)
        check_version(Fields(found, where=where, known=tuple(found)), FORMAT_VERSION)
        try:
            return cls(**_arguments(found))
        # Profiles are written by this program only: what does not read is damaged, however.
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"{where} is not a profile",
                why=f"a field is missing or damaged ({error!r})",
                remedy="measure again",
            ) from error


def _learned(before: DriveFigures, read: float, write: float) -> DriveFigures:
    """Figures of rates that are known, with both directions side by side or in turns as before."""
    both = 2 * min(read, write) if before.is_duplex else 2 / (1 / read + 1 / write)
    return DriveFigures(
        read=Figure(samples=(read,)), write=Figure(samples=(write,)), mixed=Figure(samples=(both,))
    )


def facts_fields(facts: MachineFacts) -> dict[str, object]:
    """Facts as plain values."""
    return {
        "cpu_model": facts.cpu_model,
        "num_cores": facts.num_cores,
        "ram_total_bytes": facts.ram_total_bytes,
        "device": facts.device,
        "device_hardware": facts.device_hardware,
        "drives": [
            {
                "device": drive.device,
                "model": drive.model,
                "filesystem": drive.filesystem,
                "total_bytes": drive.total_bytes,
            }
            for drive in facts.drives
        ],
    }


def _figure_fields(figure: Figure) -> dict[str, object]:
    return {
        "per_second": figure.per_second,
        "spread": figure.spread,
        "samples": list(figure.samples),
    }


def _drive_figures_fields(figures: DriveFigures) -> dict[str, object]:
    return {
        "read": _figure_fields(figures.read),
        "write": _figure_fields(figures.write),
        "mixed": _figure_fields(figures.mixed),
    }


def _settings_fields(settings: DriveSettings) -> dict[str, object]:
    return {
        "block_bytes": settings.block_bytes,
        "max_requests": settings.max_requests,
        "max_bytes": settings.max_bytes,
        "mixing": settings.mixing.value,
        "fairness_bytes": settings.fairness_bytes,
    }


def _arguments(found: Mapping[str, Any]) -> dict[str, Any]:
    facts, copies, compute = found["facts"], found["copies"], found["compute"]
    return {
        "machine": Machine.from_json(json.dumps(found["machine"])),
        "measured_at": datetime.fromisoformat(found["measured_at"]).astimezone(UTC),
        "lohan_version": _text(found["lohan_version"]),
        "seconds": float(found["seconds"]),
        "sustained_seconds": found["sustained_seconds"] and float(found["sustained_seconds"]),
        "facts": MachineFacts(
            **{**facts, "drives": tuple(DriveFacts(**one) for one in facts["drives"])}
        ),
        "io_engine": _text(found["io_engine"]),
        "drives": tuple(
            MeasuredDrive(
                path=_text(one["path"]),
                figures=_drive_figures_from(one),
                sustained_write=one["sustained_write"] and _figure_from(one["sustained_write"]),
                settings=DriveSettings(
                    **{**one["settings"], "mixing": Mixing(one["settings"]["mixing"])}
                ),
            )
            for one in found["drives"]
        ),
        "together": found["together"] and _drive_figures_from(found["together"]),
        "copies": CopyFigures(
            ram_to_gpu=_figure_from(copies["ram_to_gpu"]),
            gpu_to_ram=_figure_from(copies["gpu_to_ram"]),
            both_ways_slowdown=float(copies["both_ways_slowdown"]),
            is_pinned=bool(copies["is_pinned"]),
        ),
        "ram_copies": _figure_from(found["ram_copies"]),
        "compute": ComputeFigures(
            flops=_figure_from(compute["flops"]),
            memory=_figure_from(compute["memory"]),
            tokens=int(compute["tokens"]),
            width=int(compute["width"]),
        ),
        "updates": _figure_from(found["updates"]),
        "num_update_threads": int(found["num_update_threads"]),
        "ram_reason": _text(found["ram_reason"]),
        "notes": tuple(_text(note) for note in found["notes"]),
        "written_bytes": int(found["written_bytes"]),
    }


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError(f"a text is expected, not {found!r}")
    return found


def _figure_from(found: Mapping[str, Any]) -> Figure:
    samples = tuple(float(sample) for sample in found["samples"])
    if not samples or not all(0 < sample < math.inf for sample in samples):
        raise ValueError(f"samples are {samples}")
    return Figure(samples=samples)


def _drive_figures_from(found: Mapping[str, Any]) -> DriveFigures:
    return DriveFigures(
        read=_figure_from(found["read"]),
        write=_figure_from(found["write"]),
        mixed=_figure_from(found["mixed"]),
    )
