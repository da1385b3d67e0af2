"""Measures a whole machine, part by part, and makes a Machine of the figures.

Owns the order (memory limits, drives, copies, compute, updates), what a Machine takes from each
figure. The parts are measured in `disks`, `copies`, `compute` and `updates`; whether a kept profile
will do is asked in `profile`. Called from there, and by whoever wants fresh figures.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import lohan
from lohan.device import Device
from lohan.hardware.limits import AvailableRam
from lohan.hardware.machine import Gpu, Machine, Ssd, SsdPath
from lohan.hardware.this_host import num_usable_cores
from lohan.measure.compute import MEMORY_PIECE_BYTES, SIZES, ComputeFigures, measure_compute
from lohan.measure.copies import PIECE_BYTES, measure_copies, measure_ram_copies
from lohan.measure.disks import DiskMeasurement, DriveFigures, Report, describe
from lohan.measure.facts import DriveFacts, MachineFacts, machine_facts
from lohan.measure.figure import Clock, Figure
from lohan.measure.measured import MeasuredDrive, MeasuredMachine
from lohan.measure.memory import memory_to_plan_with
from lohan.measure.opening import OpenedDevice, check_numbers
from lohan.measure.probe_files import (
    LEAST_BYTES,
    MOST_BYTES,
    REQUEST_BYTES,
    EngineMaker,
    ProbeFiles,
    leftovers_in,
)
from lohan.measure.updates import NUM_PARAMETERS, measure_updates
from lohan.ssd import DirectoryReport, check_directories, choose_engine
from lohan.units import MIB, format_bytes, format_seconds

SECONDS = 0.4
"""Of one sample."""
SUSTAINED_SECONDS = 3.0
WRITES_PER_CAPACITY = 600
"""What drives endure, as a multiple of what they hold: usual for consumer drives. Not measured."""
_BOUND_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the things are that measuring is done on; smaller ones tell less."""

    most_file_bytes: int = MOST_BYTES
    """Of all files together."""
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


def measure_machine(
    *,
    ssd: Sequence[str | os.PathLike[str]],
    device: str | Device | None = None,
    ram_bytes: int | None = None,
    gpu_bytes: int | None = None,
    seconds: float = SECONDS,
    sustained_seconds: float = SUSTAINED_SECONDS,
    num_threads: int | None = None,
    report: Report | None = None,
    instruments: Instruments | None = None,
) -> MeasuredMachine:
    """Measure what this machine can do, now; takes a quarter of a minute and more.

    Files of up to 2 GiB together are made in the SSD directories and removed whatever happens.

    Args:
        ssd: one directory per drive.
        device: what computes; None is a GPU if there is one. One that is open stays open.
        ram_bytes, gpu_bytes: budgets to put into the machine instead of what is free.
        seconds: length of one sample; every figure is the middle of three.
        sustained_seconds: how long drives are written to without a pause.
        num_threads: of the CPU update; all cores this process may use if not given.
        report: is told what is being done, in lines for the user.

    Raises:
        ConfigError: a directory is given twice, or a time or count cannot be.
        StorageError: a directory is missing, read-only, full, or fails.
        HardwareError, DoesNotFit: the device is not there, fails or is too small.
    """
    check_numbers(seconds, sustained_seconds, num_threads)
    reports = check_directories(ssd)
    with OpenedDevice(device, gpu_bytes) as opened:
        return _Measurement(
            opened=opened,
            reports=reports,
            ram_bytes=ram_bytes,
            gpu_bytes=gpu_bytes,
            seconds=seconds,
            sustained_seconds=sustained_seconds,
            num_threads=num_threads or num_usable_cores(),
            report=report or (lambda line: None),
            instruments=instruments or Instruments(),
        ).run()


def with_room(ssds: Sequence[Ssd], reports: Sequence[DirectoryReport]) -> tuple[Ssd, ...]:
    """The drives with the space that is free now, shared by directories on one filesystem."""
    num_on = Counter(report.device for report in reports)
    return tuple(
        replace(ssd, capacity_bytes=max(1, report.free_bytes // num_on[report.device]))
        for ssd, report in zip(ssds, reports, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measurement:
    """One run over all parts."""

    opened: Device
    reports: tuple[DirectoryReport, ...]
    ram_bytes: int | None
    gpu_bytes: int | None
    seconds: float
    sustained_seconds: float
    num_threads: int
    report: Report
    instruments: Instruments

    def run(self) -> MeasuredMachine:
        """Measure everything."""
        device, clock, sizes = self.opened, self.instruments.clock, self.instruments.sizes
        facts = machine_facts(device, self.reports)
        ram, gpu, ram_reason = memory_to_plan_with(
            device, self.ram_bytes, self.gpu_bytes, available=self.instruments.available_ram
        )
        notes = [warning for report in self.reports for warning in report.warnings]
        notes += [
            f"left by a measurement that was killed: {path}" for path in leftovers_in(self.reports)
        ]
        for note in notes:
            self.report(f"beware: {note}")
        drives, together, written_bytes, engine = self._disks()
        self.report(f"copies between RAM and {device.name}")
        # Four pieces at a time, or eight where the device's memory is main memory too.
        copy_bytes = min(sizes.copy_bytes, max(ram // 32 // MIB * MIB, MIB))
        copies = measure_copies(
            device, seconds=self.seconds / 2, clock=clock, piece_bytes=copy_bytes
        )
        if not copies.is_pinned and not device.shares_ram:
            notes.append("main memory could not be pinned: copies are slower than they could be")
        self.report(f"compute on {device.name}: a transformer block in bf16")
        compute = measure_compute(
            device,
            seconds=self.seconds,
            clock=clock,
            sizes=sizes.blocks,
            memory_piece_bytes=sizes.memory_piece_bytes,
        )
        self.report(f"CPU updates with {self.num_threads} threads")
        updates = measure_updates(
            num_threads=self.num_threads,
            seconds=self.seconds,
            clock=clock,
            room_bytes=ram // 4,
            num_parameters=sizes.num_parameters,
        )
        ceiling = measure_ram_copies(seconds=self.seconds / 4, clock=clock, piece_bytes=copy_bytes)
        machine = Machine(
            name=f"measured {facts.device_hardware}",
            gpu=_gpu(facts, gpu, compute),
            num_gpus=1,
            ram_bytes=ram,
            ram_to_gpu_bytes_per_second=copies.ram_to_gpu_per_second,
            gpu_to_ram_bytes_per_second=copies.gpu_to_ram_per_second,
            cpu_update_parameters_per_second=updates.per_second,
            ssds=with_room(
                [_ssd(drive, one) for drive, one in zip(drives, facts.drives, strict=True)],
                self.reports,
            ),
            ssd_path=_path(drives, together, ceiling),
            host_price_dollars=0,
        )
        return MeasuredMachine(
            machine=machine,
            measured_at=datetime.now(UTC).replace(microsecond=0),
            lohan_version=lohan.__version__,
            seconds=self.seconds,
            sustained_seconds=self.sustained_seconds,
            facts=facts,
            io_engine=engine,
            drives=drives,
            together=together,
            copies=copies,
            compute=compute,
            updates=updates,
            num_update_threads=self.num_threads,
            ram_reason=ram_reason,
            notes=tuple(notes),
            written_bytes=written_bytes,
        )

    def _disks(self) -> tuple[tuple[MeasuredDrive, ...], DriveFigures, int, str]:
        instruments, sizes = self.instruments, self.instruments.sizes
        engine = instruments.make_engine()
        name = engine.name
        engine.close()
        self.report(f"making files on {len(self.reports)} drive(s), through {name}")
        with ProbeFiles(
            self.reports,
            instruments.make_engine,
            most_bytes=sizes.most_file_bytes,
            least_bytes=sizes.least_file_bytes,
            request_bytes=sizes.request_bytes,
        ) as files:
            timer = DiskMeasurement(files, seconds=self.seconds, clock=instruments.clock)
            drives: list[MeasuredDrive] = []
            by_device: dict[int, MeasuredDrive] = {}
            for number, report in enumerate(self.reports):
                # Two directories on one filesystem are one drive: its figures hold for both.
                if report.device not in by_device:
                    by_device[report.device] = self._drive(timer, number, report.path)
                drives.append(replace(by_device[report.device], path=report.path))
            together = drives[0].figures
            if len(drives) > 1:
                self.report("all directories together")
                together, _ = timer.measure(
                    range(len(drives)),
                    [drive.settings for drive in drives],
                    shares=[drive.weight for drive in drives],
                )
            self.report(f"{format_bytes(files.written_bytes)} were written to measure writes")
            return tuple(drives), together, files.written_bytes, name

    def _drive(self, timer: DiskMeasurement, number: int, path: str) -> MeasuredDrive:
        self.report(f"{path}: block size and queue depth")
        best = timer.choose_settings(number, self.report)
        self.report(f"{path}: reads, writes, both ({describe(best)})")
        figures, settings = timer.measure([number], [best])
        self.report(f"{path}: sustained writes for {format_seconds(self.sustained_seconds)}")
        sustained = timer.sustained_write(number, settings[0], self.sustained_seconds)
        return MeasuredDrive(
            path=path, figures=figures, sustained_write=sustained, settings=settings[0]
        )


def _gpu(facts: MachineFacts, memory_bytes: int, compute: ComputeFigures) -> Gpu:
    return Gpu(
        name=facts.device_hardware,
        memory_bytes=memory_bytes,
        flops_per_second=compute.flops.per_second,
        memory_bytes_per_second=compute.memory.per_second,
        price_dollars=0,
    )


def _ssd(drive: MeasuredDrive, facts: DriveFacts) -> Ssd:
    return Ssd(
        name=facts.name,
        read_bytes_per_second=drive.figures.read.per_second,
        write_bytes_per_second=drive.lasting_write_per_second,
        capacity_bytes=max(1, facts.total_bytes),
        endurance_bytes=max(1, facts.total_bytes * WRITES_PER_CAPACITY),
        price_dollars=0,
    )


def _path(drives: Sequence[MeasuredDrive], together: DriveFigures, ram_copies: Figure) -> SsdPath:
    """What the drives share. A ceiling that was not seen is put where main memory itself ends."""
    reads = sum(drive.figures.read.per_second for drive in drives)
    writes = sum(drive.figures.write.per_second for drive in drives)

    def ceiling(seen_per_second: float, drives_per_second: float) -> float:
        if seen_per_second < _BOUND_SHARE * drives_per_second:
            return seen_per_second
        return max(ram_copies.per_second, drives_per_second)

    return SsdPath(
        is_duplex=together.is_duplex,
        read_ceiling_bytes_per_second=ceiling(together.read.per_second, reads),
        write_ceiling_bytes_per_second=ceiling(together.write.per_second, writes),
    )
