"""Measures a whole machine, part by part, and makes a Machine of the figures.

Owns the order (memory limits, drives, copies, compute, updates), what a Machine takes from each
figure, and how many bytes may be written. The parts are measured in `disks`, `copies`, `compute`
and `updates`; which of them a kept profile has is asked in `profile`. Called from there, and by
whoever wants fresh figures.
"""

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import lohan
from lohan.device import Device, open_device
from lohan.errors import ConfigError
from lohan.hardware.limits import AvailableRam
from lohan.hardware.machine import Gpu, Machine
from lohan.hardware.this_host import num_usable_cores
from lohan.measure.as_machine import memory_to_plan_with, path_of, ssds_of, with_room
from lohan.measure.bar import OnShare, Report, Stages
from lohan.measure.compute import MEMORY_PIECE_BYTES, SIZES, ComputeFigures, measure_compute
from lohan.measure.copies import PIECE_BYTES, CopyFigures, measure_copies, measure_ram_copies
from lohan.measure.disks import DiskMeasurement, DriveFigures, describe
from lohan.measure.facts import machine_facts
from lohan.measure.figure import MOST_SPREAD, NUM_ROUNDS, Clock, Figure
from lohan.measure.measured import MeasuredDrive, MeasuredMachine, Part
from lohan.measure.probe_files import (
    LEAST_BYTES,
    REQUEST_BYTES,
    EngineMaker,
    ProbeFiles,
    leftovers_in,
)
from lohan.measure.updates import NUM_PARAMETERS, measure_updates
from lohan.ssd import DirectoryReport, check_directories, choose_engine
from lohan.units import GIB, MIB, format_bytes, format_seconds

SECONDS = 0.4
"""Of one sample."""
MOST_WRITTEN_BYTES = 2 * GIB
"""By all of a measurement, unless long writes are asked for: flash wears."""
_FILE_SHARE = 1 / 4
"""Of these bytes, in the first write of the files. The rest goes in samples."""
_NUM_SAMPLES = 4 * NUM_ROUNDS
"""With writes, of one drive: 2 x 3 to choose its settings, 3 writes, 2 x 3 that write half."""
_NUM_SAMPLES_TOGETHER = 2 * NUM_ROUNDS
"""Likewise, of all drives at once."""
_PAGE_BYTES = 4096
STEP_OVER_EAGER = 2.0
"""Host time of a step over that of eager PyTorch, of which operators are measured: about what
`benchmarks/host.py` says of several micro-batches. A run that the host holds up learns its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the things are that measuring is done on; smaller ones tell less."""

    most_written_bytes: int = MOST_WRITTEN_BYTES
    """To all drives together."""
    least_file_bytes: int = LEAST_BYTES
    request_bytes: int = REQUEST_BYTES
    copy_bytes: int = PIECE_BYTES
    memory_piece_bytes: int = MEMORY_PIECE_BYTES
    blocks: tuple[tuple[int, int], ...] = SIZES
    """Tokens and width."""
    num_parameters: int = NUM_PARAMETERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """What measuring is done with: real ones, or others in tests."""

    clock: Clock = time.perf_counter
    make_engine: EngineMaker = field(default=lambda: choose_engine()[0])
    sizes: Sizes = field(default_factory=Sizes)
    available_ram: AvailableRam | None = None
    """Asked from the system if not given."""
    most_spread: float = MOST_SPREAD
    """Figures with a wider one are not remembered."""


def measure_machine(
    *,
    ssd: Sequence[str | os.PathLike[str]],
    device: str | Device | None = None,
    ram_bytes: int | None = None,
    gpu_bytes: int | None = None,
    seconds: float = SECONDS,
    sustained_seconds: float | None = None,
    num_threads: int | None = None,
    report: Report | None = None,
    on_share: OnShare | None = None,
    instruments: Instruments | None = None,
    parts: Collection[Part] = tuple(Part),
    kept: MeasuredMachine | None = None,
) -> MeasuredMachine:
    """Measure what this machine can do, now; takes some seconds.

    Files are made in the SSD directories and removed whatever happens; at most 2 GiB are written.

    Args:
        ssd: one directory per drive.
        device: what computes; None is a GPU if there is one. One that is open stays open.
        ram_bytes, gpu_bytes: budgets to put into the machine instead of what is free.
        seconds: length of one sample; every figure is the middle of three.
        sustained_seconds: how long drives are written to without a pause, whatever that writes; not
            at all if not given, and their write rate is that of a burst.
        num_threads: of the CPU update; all cores this process may use if not given.
        report, on_share: are told what is being done, in lines for the user, and how much is done.
        parts: what to measure. The others are taken from `kept`, drives that it has not from a
            usual one.
        kept: what was measured before; needed where some parts are not.

    Raises:
        ConfigError: a directory is given twice, or a time or count cannot be.
        StorageError: a directory is missing, read-only, full, or fails.
        HardwareError, DoesNotFit: the device is not there, fails or is too small.
    """
    check_numbers(seconds, sustained_seconds, num_threads)
    reports = check_directories(ssd)
    with opened_device(device, gpu_bytes) as opened:
        return _Measurement(
            opened=opened,
            reports=reports,
            ram_bytes=ram_bytes,
            gpu_bytes=gpu_bytes,
            seconds=seconds,
            sustained_seconds=sustained_seconds,
            num_threads=num_threads or num_usable_cores(),
            stages=Stages(
                _num_stages(parts, reports, is_sustained=sustained_seconds is not None),
                report or (lambda line: None),
                on_share or (lambda share: None),
            ),
            instruments=instruments or Instruments(),
            parts=frozenset(parts),
            kept=kept,
        ).run()


def check_numbers(seconds: float, sustained_seconds: float | None, num_threads: int | None) -> None:
    """Refuse times and counts that cannot be.

    Raises:
        ConfigError: naming the one.
    """
    for name, value in (("seconds", seconds), ("sustained_seconds", sustained_seconds)):
        if value is not None and not 0 < value <= 3600:
            raise ConfigError(
                f"{name} is {value}",
                why="a measurement takes some time, and at most an hour",
                remedy="give seconds, such as 0.5",
            )
    if num_threads is not None and num_threads < 1:
        raise ConfigError(
            f"num_threads is {num_threads}",
            why="an update runs on one thread or more",
            remedy="give 1 or more, or leave it out",
        )


@contextlib.contextmanager
def opened_device(device: str | Device | None, gpu_bytes: int | None) -> Iterator[Device]:
    """A device by name, opened and closed; or one that is open already, left open."""
    if device is not None and not isinstance(device, str):
        yield device
        return
    with open_device(device, memory_bytes=gpu_bytes) as opened:
        yield opened


def _num_stages(
    parts: Collection[Part], reports: Sequence[DirectoryReport], *, is_sustained: bool
) -> int:
    if Part.DRIVES not in parts:
        return len(parts)
    num_drives = len({report.device for report in reports})
    return len(parts) + (3 if is_sustained else 2) * num_drives + (len(reports) > 1)


def _operator_seconds(compute: ComputeFigures) -> float | None:
    """What a step needs to launch an operator; None of a profile that does not have it."""
    if compute.launches is None:
        return None
    return min(1.0, STEP_OVER_EAGER / compute.launches.per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement:
    """One run over all parts."""

    opened: Device
    reports: tuple[DirectoryReport, ...]
    ram_bytes: int | None
    gpu_bytes: int | None
    seconds: float
    sustained_seconds: float | None
    num_threads: int
    stages: Stages
    instruments: Instruments
    parts: frozenset[Part]
    kept: MeasuredMachine | None

    def run(self) -> MeasuredMachine:
        """Measure what is asked for; a fault of the drives comes before the rest is measured."""
        facts, kept = machine_facts(self.opened, self.reports), self.kept
        ram, gpu, ram_reason = memory_to_plan_with(
            self.opened, self.ram_bytes, self.gpu_bytes, available=self.instruments.available_ram
        )
        notes = self._notes()
        for note in notes if self.parts else ():
            self.stages.report(f"beware: {note}")
        drives, together, written_bytes, engine = self._disks()
        copies, ram_copies = self._copies(ram)
        if not copies.is_pinned and not self.opened.shares_ram:
            notes.append("main memory could not be pinned: copies are slower than they could be")
        compute = self._compute()
        updates = self._updates(ram)
        machine = Machine(
            name=f"measured {facts.device_hardware}",
            gpu=Gpu(
                name=facts.device_hardware,
                memory_bytes=gpu,
                flops_per_second=compute.flops.per_second,
                memory_bytes_per_second=compute.memory.per_second,
                price_dollars=0,
                is_processor=self.opened.shares_ram,
            ),
            num_gpus=1,
            ram_bytes=ram,
            ram_to_gpu_bytes_per_second=copies.ram_to_gpu_per_second,
            gpu_to_ram_bytes_per_second=copies.gpu_to_ram_per_second,
            cpu_update_parameters_per_second=updates.per_second,
            ssds=with_room(ssds_of(drives, facts), self.reports),
            ssd_path=path_of(drives, together, ram_copies),
            host_price_dollars=0,
            operator_seconds=_operator_seconds(compute),
        )
        return MeasuredMachine(
            machine=machine,
            # Some figures may be newer: the oldest say how long all are kept.
            measured_at=kept.measured_at
            if kept is not None
            else datetime.now(UTC).replace(microsecond=0),
            lohan_version=lohan.__version__,
            seconds=self.seconds,
            sustained_seconds=self.sustained_seconds
            if kept is None or Part.DRIVES in self.parts
            else kept.sustained_seconds,
            facts=facts,
            io_engine=engine,
            drives=drives,
            together=together,
            copies=copies,
            ram_copies=ram_copies,
            compute=compute,
            updates=updates,
            num_update_threads=self.num_threads,
            ram_reason=ram_reason,
            notes=tuple(notes),
            written_bytes=written_bytes + (kept.written_bytes if kept is not None else 0),
            written_now_bytes=written_bytes,
        )

    def _notes(self) -> list[str]:
        warnings = [warning for report in self.reports for warning in report.warnings]
        return warnings + [
            f"left by a measurement that was killed: {path}" for path in leftovers_in(self.reports)
        ]

    def _kept(self, part: Part) -> MeasuredMachine | None:
        """The profile that has a part; None if it is to be measured."""
        return None if part in self.parts else self.kept

    def _copies(self, ram_bytes: int) -> tuple[CopyFigures, Figure]:
        if (kept := self._kept(Part.COPIES)) is not None:
            return kept.copies, kept.ram_copies
        self.stages.begin(f"copies between RAM and {self.opened.name}")
        clock, sizes = self.instruments.clock, self.instruments.sizes
        # Four pieces at a time, or eight where the device's memory is main memory too.
        piece_bytes = min(sizes.copy_bytes, max(ram_bytes // 32 // MIB * MIB, MIB))
        return (
            measure_copies(
                self.opened, seconds=self.seconds / 2, clock=clock, piece_bytes=piece_bytes
            ),
            measure_ram_copies(seconds=self.seconds / 4, clock=clock, piece_bytes=piece_bytes),
        )

    def _compute(self) -> ComputeFigures:
        if (kept := self._kept(Part.COMPUTE)) is not None:
            return kept.compute
        self.stages.begin(f"compute on {self.opened.name}: a transformer block in bf16")
        return measure_compute(
            self.opened,
            seconds=self.seconds,
            clock=self.instruments.clock,
            sizes=self.instruments.sizes.blocks,
            memory_piece_bytes=self.instruments.sizes.memory_piece_bytes,
        )

    def _updates(self, ram_bytes: int) -> Figure:
        if (kept := self._kept(Part.UPDATES)) is not None:
            return kept.updates
        self.stages.begin(f"CPU updates with {self.num_threads} threads")
        return measure_updates(
            num_threads=self.num_threads,
            seconds=self.seconds,
            clock=self.instruments.clock,
            room_bytes=ram_bytes // 4,
            num_parameters=self.instruments.sizes.num_parameters,
        )

    def _disks(self) -> tuple[tuple[MeasuredDrive, ...], DriveFigures | None, int, str]:
        if Part.DRIVES not in self.parts:
            if (kept := self.kept) is None:
                return (), None, 0, ""
            here = tuple(
                replace(drive, path=report.path)
                for drive, report in zip(kept.drives, self.reports, strict=bool(kept.drives))
            )
            return here, kept.together, 0, kept.io_engine
        instruments, sizes = self.instruments, self.instruments.sizes
        engine = instruments.make_engine()
        name = engine.name
        engine.close()
        num_drives = len(self.reports)
        self.stages.begin(f"making files on {num_drives} drive(s), through {name}")
        most_file_bytes = int(_FILE_SHARE * sizes.most_written_bytes)
        num_samples = _NUM_SAMPLES + (_NUM_SAMPLES_TOGETHER if num_drives > 1 else 0)
        sample_bytes = (sizes.most_written_bytes - most_file_bytes) // num_drives // num_samples
        with ProbeFiles(
            self.reports,
            instruments.make_engine,
            most_bytes=most_file_bytes,
            least_bytes=sizes.least_file_bytes,
            # Two at least in a sample.
            request_bytes=min(
                sizes.request_bytes, max(sample_bytes // 2 // _PAGE_BYTES, 1) * _PAGE_BYTES
            ),
        ) as files:
            timer = DiskMeasurement(
                files,
                seconds=self.seconds,
                most_sample_bytes=sample_bytes,
                clock=instruments.clock,
            )
            drives: list[MeasuredDrive] = []
            by_device: dict[int, MeasuredDrive] = {}
            for number, report in enumerate(self.reports):
                # Two directories on one filesystem are one drive: its figures hold for both.
                if report.device not in by_device:
                    by_device[report.device] = self._drive(timer, number, report.path)
                drives.append(replace(by_device[report.device], path=report.path))
            together = drives[0].figures
            if num_drives > 1:
                self.stages.begin("all directories together")
                together, _ = timer.measure(
                    range(num_drives),
                    [drive.settings for drive in drives],
                    shares=[drive.weight for drive in drives],
                )
            self.stages.report(
                f"{format_bytes(files.written_bytes)} were written to measure writes"
            )
            return tuple(drives), together, files.written_bytes, name

    def _drive(self, timer: DiskMeasurement, number: int, path: str) -> MeasuredDrive:
        self.stages.begin(f"{path}: block size and queue depth")
        best = timer.choose_settings(number, self.stages.report)
        self.stages.begin(f"{path}: reads, writes, both ({describe(best)})")
        figures, settings = timer.measure([number], [best])
        sustained = None
        if self.sustained_seconds is not None:
            self.stages.begin(
                f"{path}: sustained writes for {format_seconds(self.sustained_seconds)}"
            )
            sustained = timer.sustained_write(number, settings[0], self.sustained_seconds)
        return MeasuredDrive(
            path=path, figures=figures, sustained_write=sustained, settings=settings[0]
        )
