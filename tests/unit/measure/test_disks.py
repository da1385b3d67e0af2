"""Drives with known rates: the figures come out, and the best settings are found."""

import contextlib
import pathlib
from collections.abc import Iterator

import pytest

from lohan.measure.disks import CANDIDATES, DiskMeasurement, DriveFigures
from lohan.measure.figure import Figure
from lohan.measure.probe_files import ProbeFiles
from lohan.ssd import DriveSettings, IoEngine, Mixing, check_directories
from lohan.units import GIB, MIB
from support.timed_engine import HandClock, TimedDisk, TimedDrive

REQUEST = MIB
DEFAULT = DriveSettings()


@contextlib.contextmanager
def measured(
    root: pathlib.Path, disk: TimedDisk, *, seconds: float = 0.05
) -> Iterator[DiskMeasurement]:
    for name in disk.drives:
        (root / name).mkdir()

    def make_engine() -> IoEngine:
        return disk.make_engine()  # type: ignore[return-value]

    with ProbeFiles(
        check_directories([root / name for name in disk.drives]),
        make_engine,
        most_bytes=16 * REQUEST * len(disk.drives),
        least_bytes=REQUEST,
        request_bytes=REQUEST,
    ) as files:
        yield DiskMeasurement(files, seconds=seconds, most_sample_bytes=GIB, clock=disk.clock)
    assert disk.num_open == 0


def disk(*, is_duplex: bool = False, **drives: TimedDrive) -> TimedDisk:
    return TimedDisk(clock=HandClock(), drives=drives, is_duplex=is_duplex)


def test_the_rates_of_a_drive_come_out(tmp_path: pathlib.Path) -> None:
    with measured(tmp_path, disk(a=TimedDrive(read_per_second=2e9, write_per_second=1e9))) as timer:
        figures, settings = timer.measure([0], [DEFAULT])
        sustained = timer.sustained_write(0, DEFAULT, 0.3)
    assert figures.read.per_second == pytest.approx(2e9)
    assert figures.write.per_second == pytest.approx(1e9)
    # Half the bytes each way, in turns.
    assert figures.mixed.per_second == pytest.approx(2 / (1 / 2e9 + 1 / 1e9), rel=0.05)
    assert not figures.is_duplex
    assert settings == (DEFAULT,)
    assert sustained.per_second == pytest.approx(1e9, rel=0.05)
    assert figures.read.spread == pytest.approx(0, abs=1e-9)


def test_a_drive_that_does_both_at_once_is_duplex(tmp_path: pathlib.Path) -> None:
    both = TimedDrive(read_per_second=1e9, write_per_second=1e9)
    with measured(tmp_path, disk(a=both, is_duplex=True)) as timer:
        figures, _ = timer.measure([0], [DEFAULT])
    assert figures.mixed.per_second == pytest.approx(2e9, rel=0.05)
    assert figures.is_duplex


def test_a_drive_that_hates_mixing_gets_runs_of_one_direction(tmp_path: pathlib.Path) -> None:
    def factor(settings: DriveSettings) -> float:
        return 1.0 if settings.mixing is Mixing.SIMPLEX else 0.5

    with measured(tmp_path, disk(a=TimedDrive(factor=factor))) as timer:
        figures, settings = timer.measure([0], [DEFAULT])
    assert settings[0].mixing is Mixing.SIMPLEX
    assert settings[0].block_bytes == DEFAULT.block_bytes
    assert figures.mixed.per_second == pytest.approx(2 / (1 / 2e9 + 1 / 1e9), rel=0.05)


def test_sustained_writes_show_a_full_cache(tmp_path: pathlib.Path) -> None:
    drive = TimedDrive(write_per_second=1e9, slow_after_bytes=400 * MIB)
    with measured(tmp_path, disk(a=drive)) as timer:
        burst, _ = timer.measure([0], [DEFAULT])
        sustained = timer.sustained_write(0, DEFAULT, 2.0)
    assert burst.write.per_second == pytest.approx(1e9)
    assert sustained.per_second == pytest.approx(1e8, rel=0.1)


@pytest.mark.slow
def test_directories_together_add_up(tmp_path: pathlib.Path) -> None:
    drives = {
        "fast": TimedDrive(read_per_second=3e9, write_per_second=3e9),
        "slow": TimedDrive(read_per_second=1e9, write_per_second=1e9),
    }
    with measured(tmp_path, disk(**drives)) as timer:
        figures, _ = timer.measure([0, 1], [DEFAULT] * 2, shares=[3.0, 1.0])
        even, _ = timer.measure([0, 1], [DEFAULT] * 2)
        alone, _ = timer.measure([1], [DEFAULT])
    assert figures.read.per_second == pytest.approx(4e9, rel=0.05)
    assert figures.mixed.per_second == pytest.approx(4e9, rel=0.1)
    # Equal shares wait for the slow one.
    assert even.read.per_second == pytest.approx(2e9, rel=0.05)
    assert alone.read.per_second == pytest.approx(1e9, rel=0.05)


@pytest.mark.slow
def test_settings_that_are_clearly_better_are_taken(tmp_path: pathlib.Path) -> None:
    best = CANDIDATES[-2]
    said: list[str] = []

    def factor(settings: DriveSettings) -> float:
        return 1.5 if settings == best else 1.0

    with measured(tmp_path, disk(a=TimedDrive(factor=factor))) as timer:
        assert timer.choose_settings(0, said.append) == best
    assert said[0].endswith("taken")


@pytest.mark.slow
def test_settings_that_are_hardly_better_are_not(tmp_path: pathlib.Path) -> None:
    said: list[str] = []

    def factor(settings: DriveSettings) -> float:
        return 1.05 if settings == CANDIDATES[3] else 1.0

    with measured(tmp_path, disk(a=TimedDrive(factor=factor))) as timer:
        assert timer.choose_settings(0, said.append) == DEFAULT
    assert "the default stays" in said[0]


def test_the_default_needs_no_second_look(tmp_path: pathlib.Path) -> None:
    def factor(settings: DriveSettings) -> float:
        return 1.0 if settings == DEFAULT else 0.5

    said: list[str] = []
    box = disk(a=TimedDrive(factor=factor))
    with measured(tmp_path, box) as timer:
        before = box.num_engines
        assert timer.choose_settings(0, said.append) == DEFAULT
        assert box.num_engines - before == len(CANDIDATES)
    assert said == []


def test_the_default_is_the_first_candidate_and_none_comes_twice() -> None:
    assert CANDIDATES[0] == DEFAULT
    assert len(set(CANDIDATES)) == len(CANDIDATES)


@pytest.mark.parametrize(
    ("mixed", "is_duplex"), [(2e9, True), (1.5e9, True), (1.35e9, False), (0.5e9, False)]
)
def test_duplex_is_what_the_mixed_rate_is_nearer_to(mixed: float, is_duplex: bool) -> None:
    one = Figure(samples=(1e9,))
    figures = DriveFigures(read=one, write=one, mixed=Figure(samples=(mixed,)))
    assert figures.is_duplex is is_duplex
