"""What the doctor finds: every problem is named with what to do about it."""

import json
import pathlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import metadata
from typing import Any

import pytest
import torch

from lohan import measure
from lohan.device import CpuDevice, EmulatedDevice
from lohan.device.self_test import failed_promises
from lohan.doctor import Examination, Finding, Level, checks, examine, report_text, software
from lohan.doctor.finding import without_paths
from lohan.errors import HardwareError
from lohan.hardware.limits import AvailableRam
from lohan.measure import LoadedProfile
from lohan.units import GIB, MIB
from support.profiles import profile


def named(findings: Any, name: str) -> Finding:
    (found,) = [one for one in findings if one.name == name]
    return found


def test_a_machine_like_this_one_is_ready_and_nothing_is_left_behind(
    tmp_path: pathlib.Path,
) -> None:
    found = examine(ssd=[tmp_path], device="cpu")
    assert found.is_ready
    assert list(tmp_path.iterdir()) == []
    assert named(found.findings, "update kernels").level is Level.FINE
    assert "direct" in named(found.findings, f"SSD directory {tmp_path}").found or "buffered" in (
        named(found.findings, f"SSD directory {tmp_path}").found
    )
    assert all(one.remedy for one in found.findings if one.level is not Level.FINE)


# Software -----------------------------------------------------------------------------------


def versions(monkeypatch: pytest.MonkeyPatch, **given: str | None) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name not in given:
            return real(name)
        if given[name] is None:
            raise metadata.PackageNotFoundError(name)
        return str(given[name])

    monkeypatch.setattr(metadata, "version", version)


def test_a_missing_package_is_a_problem_unless_training_can_do_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions(monkeypatch, trl=None, diffusers=None)
    found = list(software.examine_software())
    assert named(found, "trl").level is Level.PROBLEM
    assert "lohan[train]" in named(found, "trl").remedy
    assert named(found, "diffusers").level is Level.FINE


def test_a_version_outside_the_range_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, transformers="4.40.0", torch="2.13.1+cpu")
    found = list(software.examine_software())
    assert named(found, "transformers").level is Level.PROBLEM
    assert "pip install" in named(found, "transformers").remedy
    assert named(found, "torch").level is Level.FINE


def test_ranges_come_from_the_package_and_what_cannot_be_told_passes() -> None:
    wanted = software.wanted_versions()
    assert len(wanted["transformers"]) == 2
    assert "pytest" not in wanted
    assert software.is_within("1.0", "not a range")
    assert software.is_within("unknown", ">=1")


def test_every_usable_kernel_gives_the_judges_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from lohan import _native

    assert all(software.gives_the_judges_bits(isa) for isa in _native.available_kernel_isas())
    monkeypatch.setattr(software, "gives_the_judges_bits", lambda isa: isa == "portable")
    wrong = named(software.examine_kernels(), "update kernels")
    is_vector = _native.kernel_isa() != "portable"
    assert (wrong.level is Level.PROBLEM) is is_vector


def test_a_kernel_that_updates_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from lohan import optimizer

    monkeypatch.setattr(optimizer, "update_states", lambda *given, **named: None)
    assert not software.gives_the_judges_bits("portable")


# Device -------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu", "emulated", "bounded"])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = {
        "cpu": CpuDevice,
        "emulated": EmulatedDevice,
        "bounded": lambda: EmulatedDevice(memory_bytes=64 * MIB),
    }[request.param]()
    yield made
    made.close()


def test_every_device_passes_its_self_test(device: Any) -> None:
    before = torch.get_rng_state()
    assert failed_promises(device) == []
    assert device.bytes_in_use == 0
    assert torch.equal(torch.get_rng_state(), before)


class ForgetfulDevice(CpuDevice):
    """Copies nothing, hands out all it is asked for, and forgets its random numbers."""

    def copy_async(self, dst: Any, src: Any, **given: Any) -> Any:
        return self.record()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Nothing."""

    def alloc(self, nbytes: int) -> Any:
        self.memory_bytes, kept = None, self.memory_bytes
        try:
            return super().alloc(nbytes % (2 * MIB))
        finally:
            self.memory_bytes = kept


def test_a_device_that_breaks_its_promises_is_found_out() -> None:
    with ForgetfulDevice(memory_bytes=16 * MIB) as broken:
        failures = failed_promises(broken)
        assert len(failures) == 4
        found = named(checks.examine_device(broken), "device self-test")
    assert found.level is Level.PROBLEM


def test_a_device_that_is_not_there_is_a_problem() -> None:
    found = examine(device="cuda:99")
    assert not found.is_ready
    assert named(found.findings, "device").level is Level.PROBLEM
    assert "not a device" in named(examine(device="tpu").findings, "device").found


# I/O, memory, directories -------------------------------------------------------------------


def test_threads_in_place_of_io_uring_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def close(self) -> None:
            """Nothing."""

    monkeypatch.setattr(checks, "choose_engine", lambda: (Engine(), "threads: forbidden here"))
    found = checks.examine_io_engine()
    assert (found.level, found.found) == (Level.NOTE, "threads: forbidden here")

    def fail() -> Any:
        raise OSError("no descriptors left")

    monkeypatch.setattr(checks, "choose_engine", fail)
    assert checks.examine_io_engine().level is Level.PROBLEM


@pytest.mark.parametrize(
    ("free_bytes", "level"),
    [(64 * GIB, Level.FINE), (GIB, Level.NOTE), (100 * MIB, Level.PROBLEM)],
)
def test_little_ram_is_noted_and_too_little_is_a_problem(
    free_bytes: int, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = AvailableRam(bytes=free_bytes, reason="as told")
    monkeypatch.setattr(checks, "available_ram_bytes", lambda **given: free)
    found = list(checks.examine_ram(None))
    assert named(found, "free RAM").level is level
    assert "as told" in named(found, "free RAM").found
    assert named(found, "locked memory").found == "not limited"


@pytest.mark.parametrize(
    ("is_bound", "lockable_bytes", "level"),
    [
        (True, 64 * MIB, Level.PROBLEM),
        (True, 64 * GIB, Level.FINE),
        (False, 64 * MIB, Level.FINE),
    ],
)
def test_a_low_limit_of_locked_memory_matters_where_the_device_counts_it(
    is_bound: bool, lockable_bytes: int, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = AvailableRam(bytes=64 * GIB, reason="as told", lockable_bytes=lockable_bytes)
    monkeypatch.setattr(checks, "available_ram_bytes", lambda **given: free)
    monkeypatch.setattr(checks, "is_bound_by_locking", lambda device: is_bound)
    with CpuDevice() as device:
        found = named(checks.examine_ram(device), "locked memory")
    assert found.level is level


def test_a_kernel_that_does_not_say_what_is_free_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**given: Any) -> AvailableRam:
        raise HardwareError("nothing is said", why="no /proc", remedy="mount it")

    monkeypatch.setattr(checks, "available_ram_bytes", fail)
    (found,) = checks.examine_ram(None)
    assert (found.level, found.remedy) == (Level.PROBLEM, "mount it")


def test_directories_are_checked_one_by_one(tmp_path: pathlib.Path) -> None:
    good, file, missing = tmp_path / "good", tmp_path / "file", tmp_path / "missing"
    good.mkdir()
    file.write_text("")
    reports, found = checks.examine_directories([good, file, missing])
    assert [report.path for report in reports] == [str(good.resolve())]
    assert named(found, f"SSD directory {file}").level is Level.PROBLEM
    assert named(found, f"SSD directory {missing}").level is Level.PROBLEM
    assert named(found, f"SSD directory {good}").level is not Level.PROBLEM


def test_a_directory_given_twice_is_a_problem(tmp_path: pathlib.Path) -> None:
    _, found = checks.examine_directories([tmp_path, tmp_path / "."])
    assert named(found, "SSD directories").level is Level.PROBLEM


def test_left_runs_are_noted(tmp_path: pathlib.Path) -> None:
    import lohan
    from lohan.verify import make_small_copy
    from lohan.verify.cases import even_machine

    copy = make_small_copy("gpt-13b")
    model = copy.make()
    with lohan.attach(
        model,
        lohan.AdamW(model.parameters()),
        ssd=tmp_path,
        ram="64MiB",
        device="cpu",
        machine=even_machine(1),
        weights=copy.values(model),
    ):
        assert all(one.name != "left runs" for one in checks.examine_directories([tmp_path])[1])
    found = named(checks.examine_directories([tmp_path])[1], "left runs")
    assert found.found.startswith("1 with ")
    assert "lohan clean" in found.remedy


def test_a_profile_is_shown_with_its_age(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reports, _ = checks.examine_directories([tmp_path])
    with CpuDevice() as device:
        assert checks.examine_profile(device, []).found.startswith("0 kept")
        missing = checks.examine_profile(device, reports)
        assert missing.level is Level.NOTE
        assert "lohan profile" in missing.remedy
        old = profile()
        object.__setattr__(old, "measured_at", datetime.now(UTC) - timedelta(days=3, hours=1))
        monkeypatch.setattr(
            measure, "load_profile", lambda facts: LoadedProfile(profile=old, reason="kept there")
        )
        assert checks.examine_profile(device, reports).found == "measured 3 days ago, kept there"


# The report ---------------------------------------------------------------------------------


def test_a_report_names_no_place_in_someones_files(tmp_path: pathlib.Path) -> None:
    place = tmp_path / "jane doe"
    place.mkdir()
    text = report_text(examine(ssd=[place, tmp_path / "none"], device="cpu"))
    assert text.startswith("lohan doctor: not ready\n")
    assert "<ssd 1>" in text
    assert "jane" not in text
    assert str(tmp_path) not in text
    assert "[problem]" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kept in /home/jane/.cache/lohan/x.json", "kept in <path>"),
        ("on ~/data and /dev/nvme0n1p2", "on <path> and /dev/nvme0n1p2"),
        ("4.5 of 8, copies/order, 1/2", "4.5 of 8, copies/order, 1/2"),
        ("(/mnt/a b), s is s", "(<path> b), <ssd 1> is <ssd 1>"),
    ],
)
def test_paths_are_taken_out_and_other_slashes_stay(text: str, expected: str) -> None:
    assert without_paths(text, ("s",)) == expected


def test_an_examination_without_problems_is_ready() -> None:
    note = Finding(name="x", found="y", level=Level.NOTE, remedy="z")
    assert Examination(findings=(note,), directories=()).is_ready
    assert json.dumps(note.level) == '"note"'
