"""What measuring writes: little, nothing where it can be done without, and all of it counted."""

import os
import pathlib
from dataclasses import replace
from typing import Any

import pytest

from lohan.hardware.drive_life import DriveWear, LifeSource
from lohan.measure import Figure, Part, Sizes, measure_machine, profile_machine, save_profile
from lohan.measure.as_machine import ssds_of
from lohan.measure.machine import MOST_WRITTEN_BYTES
from lohan.measure.measured import MeasuredMachine
from lohan.measure.profile import remember_drives
from lohan.units import GIB, MIB, TB
from support.profiles import profile, quick_instruments, quick_options, steady
from support.timed_engine import HandClock, TimedDisk, TimedDrive

NO_DRIVES = [part for part in Part if part is not Part.DRIVES]


def test_two_gib_by_default() -> None:
    assert Sizes().most_written_bytes == MOST_WRITTEN_BYTES == 2 * GIB


@pytest.mark.parametrize("num_drives", [1, 2, 12])
def test_no_more_is_written_than_allowed_however_fast_drives_are(
    tmp_path: pathlib.Path, num_drives: int
) -> None:
    names = [f"drive{number}" for number in range(num_drives)]
    # Settings other than the default are better, so that they are compared by writes too.
    drives = {
        name: TimedDrive(write_per_second=1e12, factor=lambda one: one.max_requests)
        for name in names
    }
    disk = TimedDisk(clock=HandClock(), drives=drives)
    instruments = quick_instruments(disk.make_engine)  # type: ignore[arg-type]
    for name in names:
        (tmp_path / name).mkdir()
    found = measure_machine(
        **{**quick_options(tmp_path), "ssd": [tmp_path / name for name in names]}
        | {"seconds": 1e-3, "sustained_seconds": None},
        instruments=replace(instruments, clock=disk.clock),
        parts=[Part.DRIVES],
        kept=profile(),
    )
    written = sum(drive.written_bytes for drive in drives.values())
    assert written == found.written_now_bytes
    assert 8 * MIB <= written <= instruments.sizes.most_written_bytes
    assert found.is_burst


def test_without_a_need_for_drives_nothing_is_written(tmp_path: pathlib.Path) -> None:
    def refuse() -> Any:
        raise AssertionError("a drive was touched")

    ssd = tmp_path / "ssd"
    ssd.mkdir()
    options = {**quick_options(ssd), "cache": tmp_path / "cache"}
    found, _ = profile_machine(**options, instruments=quick_instruments(refuse), needed=NO_DRIVES)
    assert found.written_bytes == found.written_now_bytes == 0
    assert found.drives == ()
    assert len(found.machine.ssds) == 1
    # What was measured is kept, and drives are added when they are needed.
    more, why = profile_machine(**options, instruments=quick_instruments())
    assert "there are none" in why
    assert (more.compute, more.updates) == (found.compute, found.updates)
    assert more.written_now_bytes > 0
    again, why = profile_machine(**options, instruments=quick_instruments(refuse))
    assert why.startswith("kept in")
    assert again.written_now_bytes == 0
    assert again.written_bytes == more.written_now_bytes


def test_figures_taken_under_load_are_measured_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    options = {**quick_options(ssd), "cache": tmp_path / "cache"}
    calm = replace(quick_instruments(), most_spread=0.25)
    samples = iter([(1e9, 1e9, 1.3e9), (2e9, 2e9, 2.4e9)])
    monkeypatch.setattr(
        "lohan.measure.machine.measure_updates", lambda **_: Figure(samples=next(samples))
    )
    _, why = profile_machine(**options, instruments=calm, needed=NO_DRIVES)
    assert "updates" in why.partition("kept in")[2]
    second, why = profile_machine(**options, instruments=calm, needed=[Part.UPDATES])
    assert "varied too much" in why
    assert second.machine.cpu_update_parameters_per_second == 2e9
    third, why = profile_machine(**options, instruments=calm, needed=[Part.UPDATES])
    assert why.startswith("kept in")
    assert third.updates == second.updates


def test_how_much_is_done_is_told(tmp_path: pathlib.Path) -> None:
    shares: list[float] = []
    options = {**quick_options(tmp_path), "sustained_seconds": 1e-3}
    measure_machine(**options, instruments=quick_instruments(), on_share=shares.append)
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 0.8 < shares[-1] < 1
    assert os.listdir(tmp_path) == []


def test_directories_on_one_drive_share_its_life_as_its_counter_tells_it() -> None:
    facts = profile().facts  # two directories on one drive of 1 TB
    asked: list[str] = []

    def worn(device: str) -> DriveWear:
        asked.append(device)
        return DriveWear(written_bytes=80 * TB, used_share=0.1)

    found = ssds_of((), facts, worn)
    assert asked == ["/dev/a"]
    assert [ssd.endurance_bytes for ssd in found] == [400 * TB, 400 * TB]
    assert {(ssd.life, ssd.used_share) for ssd in found} == {(LifeSource.WEAR_COUNTER, 0.1)}
    silent = ssds_of((), facts, lambda device: None)
    assert sum(ssd.endurance_bytes for ssd in silent) == 600 * TB
    assert {(ssd.life, ssd.used_share) for ssd in silent} == {(LifeSource.ASSUMED, None)}


def noisy(found: MeasuredMachine) -> MeasuredMachine:
    """As measured beside something else that writes."""
    drives = tuple(
        replace(one, figures=replace(one.figures, write=Figure(samples=(1e9, 2e9, 3e9))))
        for one in found.drives
    )
    return replace(found, drives=drives)


@pytest.mark.parametrize("is_duplex", [False, True])
def test_rates_that_steps_have_reached_are_sure(is_duplex: bool) -> None:
    measured = noisy(profile())
    assert measured.together is not None
    mixed = Figure(samples=(1e12 if is_duplex else 1.0,))
    measured = replace(measured, together=replace(measured.together, mixed=mixed))
    assert measured.unsure_parts() == {Part.DRIVES}
    one, two = measured.machine.with_ssds(2).ssds
    slow = replace(one, read_bytes_per_second=1e9, write_bytes_per_second=2e8)
    learned = measured.machine.with_ssds(2)
    learned = replace(learned, ssds=(slow, two))
    found = measured.with_learned_drives(learned)
    assert found.unsure_parts() == frozenset()
    assert MeasuredMachine.from_json(found.to_json()) == found
    rates = [(ssd.read_bytes_per_second, ssd.write_bytes_per_second) for ssd in learned.ssds]
    again = ssds_of(found.drives, found.facts, lambda device: None)
    assert [(ssd.read_bytes_per_second, ssd.write_bytes_per_second) for ssd in again] == rates
    assert found.together is not None
    assert found.together.is_duplex is is_duplex
    assert found.with_learned_drives(learned).notes == found.notes
    assert "those a run has reached" in found.notes[-1]


def test_drives_that_are_never_quiet_are_not_measured_after_a_run(tmp_path: pathlib.Path) -> None:
    def refuse() -> Any:
        raise AssertionError("a drive was touched")

    ssd, cache = tmp_path / "ssd", tmp_path / "cache"
    ssd.mkdir()
    options = {**quick_options(ssd), "cache": cache}
    first, _ = profile_machine(**options, instruments=quick_instruments())
    measured = noisy(steady(first))
    save_profile(measured, directory=cache)
    calm = replace(quick_instruments(refuse), most_spread=0.25)
    with pytest.raises(AssertionError, match="a drive was touched"):
        profile_machine(**options, instruments=calm)
    learned = measured.machine
    remember_drives(measured, learned, cache=cache)
    again, why = profile_machine(**options, instruments=calm)
    assert why.startswith("kept in")
    assert again.machine.ssds[0].write_bytes_per_second == learned.ssds[0].write_bytes_per_second
    # What is sure stays as it is, and so does a machine nobody has measured.
    faster = replace(learned.ssds[0], write_bytes_per_second=9e9)
    remember_drives(measured, replace(learned, ssds=(faster,)), cache=cache)
    assert profile_machine(**options, instruments=calm)[0].drives == again.drives
    remember_drives(profile(), learned, cache=cache)
