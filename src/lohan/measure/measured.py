"""MeasuredMachine: a Machine with where its numbers come from, and its JSON form (version 2).

Owns the record: date, figures with their spread, what was chosen for each drive. Measures nothing
(`machine.py`) and stores nothing (`cache.py`). Read by `lohan profile`, and by whoever lays out
files over several drives.
"""

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Self

from msgspec import Meta, to_builtins

from lohan.errors import ConfigError
from lohan.fields import check_version, convert, parse_object
from lohan.hardware.machine import Machine
from lohan.measure.compute import ComputeFigures
from lohan.measure.copies import CopyFigures
from lohan.measure.disks import DriveFigures
from lohan.measure.facts import MachineFacts
from lohan.measure.figure import MOST_SPREAD, Figure
from lohan.ssd import DriveSettings

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

    measured_at: Annotated[datetime, Meta(tz=True)]
    """In UTC."""
    lohan_version: str
    seconds: float
    """Of one sample."""
    sustained_seconds: float | None
    machine: Machine
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
    notes: tuple[str, ...]
    """What else the user should know."""
    written_bytes: int
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
        found = _with_middles(to_builtins(self))
        found |= {
            "measured_at": self.measured_at.isoformat(timespec="seconds"),
            "machine": json.loads(self.machine.to_json()),
            "drives": [
                {
                    "path": drive.path,
                    **listed["figures"],
                    "sustained_write": listed["sustained_write"],
                    "weight": drive.weight,
                    "settings": listed["settings"],
                }
                for drive, listed in zip(self.drives, found["drives"], strict=True)
            ],
        }
        del found["written_now_bytes"]
        return {"version": FORMAT_VERSION, **found}

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
        check_version(found, FORMAT_VERSION, where=where)
        machine = Machine.from_json(json.dumps(found.get("machine")), where=f"{where}.machine")
        # A drive's figures lie beside its other fields.
        drives = [
            one | {"figures": one} if isinstance(one, dict) else one
            for one in convert(found.get("drives"), list[Any], where=f"{where}.drives")
        ]
        try:
            return convert(found | {"machine": machine, "drives": drives}, cls, where=where)
        except AssertionError as error:
            raise ConfigError(
                f"{where} is not a profile",
                why=f"its fields contradict each other ({error})",
                remedy="measure again",
            ) from error


def _learned(before: DriveFigures, read: float, write: float) -> DriveFigures:
    """Figures of rates that are known, with both directions side by side or in turns as before."""
    both = 2 * min(read, write) if before.is_duplex else 2 / (1 / read + 1 / write)
    return DriveFigures(
        read=Figure(samples=(read,)), write=Figure(samples=(write,)), mixed=Figure(samples=(both,))
    )


def _with_middles(found: Any) -> Any:
    """Add to the samples of each figure, in plain values, what follows from them."""
    if isinstance(found, dict) and found.keys() == {"samples"}:
        figure = Figure(samples=found["samples"])
        return {"per_second": figure.per_second, "spread": figure.spread, **found}
    if isinstance(found, dict):
        return {key: _with_middles(value) for key, value in found.items()}
    return [_with_middles(one) for one in found] if isinstance(found, list | tuple) else found
