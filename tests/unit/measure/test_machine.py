"""A whole machine, measured quickly and for real; and what becomes of a kept profile."""

import pathlib
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from lohan.device import CpuDevice, EmulatedDevice
from lohan.errors import ConfigError, StorageError
from lohan.hardware import AvailableRam, Machine
from lohan.measure import as_machine, measure_machine, profile_machine, save_profile
from lohan.measure.disks import DriveFigures
from lohan.units import GIB, MIB
from support.profiles import drive, figure, profile, quick_instruments, quick_options


def test_a_machine_is_measured_and_nothing_is_left(tmp_path: pathlib.Path) -> None:
    said: list[str] = []
    found = measure_machine(
        **quick_options(tmp_path), report=said.append, instruments=quick_instruments()
    )
    assert list(tmp_path.iterdir()) == []
    assert Machine.from_json(found.machine.to_json()) == found.machine
    machine = found.machine
    (one,) = found.drives
    assert machine.ssds[0].read_bytes_per_second == one.figures.read.per_second
    assert machine.ssds[0].write_bytes_per_second == one.lasting_write_per_second
    assert machine.cpu_update_parameters_per_second == found.updates.per_second
    assert machine.gpu.flops_per_second == found.compute.flops.per_second
    assert machine.ssds[0].capacity_bytes <= found.facts.drives[0].total_bytes
    assert found.written_bytes >= 8 * MIB
    assert (datetime.now(UTC) - found.measured_at).total_seconds() < 600
    assert any("block size" in line for line in said)
    assert any("were written" in line for line in said)


def test_two_directories_of_a_drive_are_measured_alone_and_together(tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    options = {**quick_options(tmp_path), "ssd": paths}
    found = measure_machine(**options, instruments=quick_instruments())
    assert len(found.drives) == len(found.weights) == len(found.machine.ssds) == 2
    # On one filesystem they share what is free, and the note says they are no faster.
    free = found.machine.ssds[0].capacity_bytes
    assert 2 * free <= found.facts.drives[0].total_bytes
    assert any("same filesystem" in note for note in found.notes)
    assert found.together != found.drives[0].figures
    assert found.drives[0].figures == found.drives[1].figures
    assert [one.path for one in found.drives] == [str(path) for path in paths]


def test_an_open_device_stays_open_and_budgets_are_kept(tmp_path: pathlib.Path) -> None:
    options = {**quick_options(tmp_path), "ram_bytes": 3 * GIB, "gpu_bytes": GIB}
    with EmulatedDevice() as device:
        options["device"] = device
        found = measure_machine(**options, instruments=quick_instruments())
        device.alloc(4096)
    assert found.machine.ram_bytes == 3 * GIB
    assert found.machine.gpu.memory_bytes == GIB
    assert found.facts.device == "emulated"


def test_a_second_time_uses_what_was_kept(tmp_path: pathlib.Path) -> None:
    cache, ssd = tmp_path / "cache", tmp_path / "ssd"
    ssd.mkdir()
    options = {**quick_options(ssd), "cache": cache}
    instruments = quick_instruments()
    said: list[str] = []
    first, why = profile_machine(**options, instruments=instruments, report=said.append)
    assert "measured now (this hardware has not been measured yet)" in why
    assert said[0] == (
        "measuring drives, copies, compute, updates: this hardware has not been measured yet"
    )
    said.clear()
    left = AvailableRam(bytes=8 * GIB, reason="8 GiB are free")
    second, why = profile_machine(
        **options, instruments=replace(instruments, available_ram=left), report=said.append
    )
    assert said == []
    assert why.startswith("kept in ")
    assert second.drives == first.drives
    # Memory is asked anew.
    assert second.machine.ram_bytes == 4 * GIB
    assert "8 GiB are free" in second.ram_reason
    _, why = profile_machine(**options, instruments=instruments, should_refresh=True)
    assert "measured now (asked for)" in why
    _, why = profile_machine(**{**options, "num_threads": 2}, instruments=instruments)
    assert "measured with 1 threads" in why


def test_a_profile_that_cannot_be_kept_is_still_given(tmp_path: pathlib.Path) -> None:
    ssd, cache = tmp_path / "ssd", tmp_path / "file"
    ssd.mkdir()
    cache.write_text("in the way")
    said: list[str] = []
    found, why = profile_machine(
        **quick_options(ssd), cache=cache, instruments=quick_instruments(), report=said.append
    )
    assert found.machine
    assert why.endswith("not kept")
    assert any(line.startswith("not kept: ") for line in said)


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": 0},
        {"seconds": float("nan")},
        {"sustained_seconds": -1},
        {"sustained_seconds": 1e9},
        {"num_threads": 0},
        {"ssd": []},
    ],
)
def test_impossible_requests_are_refused(
    tmp_path: pathlib.Path, changes: dict[str, object]
) -> None:
    for call in (measure_machine, profile_machine):
        with pytest.raises(ConfigError):
            call(**{**quick_options(tmp_path), **changes})  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []


def test_bad_directories_are_refused_before_anything_runs(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for bad in (tmp_path / "none", file):
        with pytest.raises(StorageError, match="cannot be used"):
            measure_machine(**{**quick_options(tmp_path), "ssd": [bad]})
    with pytest.raises(ConfigError, match="given twice"):
        measure_machine(**{**quick_options(tmp_path), "ssd": [tmp_path, tmp_path]})


def path_of(together: DriveFigures) -> tuple[float, float, bool]:
    drives = [drive("/a", read=4e9, write=2e9, lasting=2e9)] * 2
    found = as_machine.path_of(drives, together, figure(5e10))
    return (
        found.read_ceiling_bytes_per_second,
        found.write_ceiling_bytes_per_second,
        found.is_duplex,
    )


def test_a_ceiling_is_what_was_seen_or_where_memory_ends() -> None:
    free = DriveFigures(read=figure(8e9), write=figure(4e9), mixed=figure(8e9))
    assert path_of(free) == (5e10, 5e10, True)
    bound = DriveFigures(read=figure(5e9), write=figure(4e9), mixed=figure(4e9))
    assert path_of(bound) == (5e9, 5e10, False)


def test_a_profile_of_one_directory_serves_another_on_the_same_drive(
    tmp_path: pathlib.Path,
) -> None:
    from lohan.measure import machine_facts
    from lohan.ssd import check_directories

    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    with CpuDevice() as device:
        facts = machine_facts(device, check_directories([first]))
    kept = profile(facts=facts, drives=(drive(str(first)),), num_update_threads=1)
    save_profile(replace(kept, measured_at=datetime.now(UTC)), directory=tmp_path / "cache")
    found, why = profile_machine(**quick_options(other), cache=tmp_path / "cache")
    assert why.startswith("kept in")
    assert found.drives[0].path == str(other)
