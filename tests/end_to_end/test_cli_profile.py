"""`lohan profile`: measured once, shown again, given to `lohan plan`; and refusals."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest

from lohan.hardware import Machine
from lohan.measure import profile as profiling
from support.command_line import Ran, run_lohan
from support.profiles import drive, profile, quick_instruments, steady


@pytest.fixture
def ssd(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A directory to measure, with a cache and sizes of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = profiling.measure_machine

    def quick(**options: Any) -> object:
        options |= {"seconds": 1e-3, "instruments": quick_instruments()}
        return steady(real(**options))

    monkeypatch.setattr(profiling, "measure_machine", quick)
    path = tmp_path / "ssd"
    path.mkdir()
    return path


def run(ssd: pathlib.Path, *words: object) -> Ran:
    return run_lohan("profile", "--ssd", ssd, "--device", "cpu", "--sustained", 0.01, *words)


def test_a_machine_is_measured_shown_and_kept(ssd: pathlib.Path) -> None:
    first = run(ssd)
    assert first.exit_code == 0
    assert "measured now" in first.stdout
    for words in ("SSD directories", "CPU updates", "Memory to plan with", "--refresh"):
        assert words in first.stdout
    assert "measuring drives, copies, compute, updates: asked for" in first.stderr
    assert list(ssd.iterdir()) == []
    second = run_lohan("profile", "--ssd", ssd, "--device", "cpu")
    assert second.exit_code == 0
    assert "kept in" in second.stdout.replace("\n", " ")
    assert second.stderr == ""
    third = run_lohan("profile", "--ssd", ssd, "--device", "cpu", "--refresh")
    assert "measured now (asked for)" in third.stdout


def test_json_is_one_object_with_every_number(ssd: pathlib.Path) -> None:
    ran = run(ssd, "--json", "--ram", "3GiB", "--gpu", "2GiB")
    fields = ran.fields
    assert fields["machine"]["ram_bytes"] == 3 * 2**30
    assert fields["machine"]["gpu"]["memory_bytes"] == 2 * 2**30
    assert len(fields["drives"][0]["read"]["samples"]) == 3
    assert fields["drives"][0]["settings"]["block_bytes"] > 0
    assert fields["meaning"]["bottleneck"]
    assert "measured now" in fields["source"]


@pytest.mark.slow
def test_the_machine_it_writes_can_be_planned_with(
    ssd: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "machine.json"
    assert run(ssd, "--out", out, "--ram", "8GiB", "--gpu", "8GiB").exit_code == 0
    Machine.load(out)
    planned = run_lohan("plan", "gpt2", "--machine", out, "--batch", 1, "--json")
    assert planned.exit_code in (0, 1)
    assert planned.fields["machine"].startswith("measured ")


def test_refusals_come_before_measuring(ssd: pathlib.Path, tmp_path: pathlib.Path) -> None:
    taken = tmp_path / "taken.json"
    taken.write_text("{}")
    for words in (
        ("--ssd", tmp_path / "none"),
        ("--ssd", ssd),
        ("--out", taken),
        ("--ram", "8"),
        ("--sustained", "-1"),
        ("--device", "toaster"),
    ):
        ran = run_lohan("profile", "--ssd", ssd, "--device", "cpu", *words)
        assert ran.exit_code == 2, words
        assert ran.stderr.startswith("error: "), words
        assert ran.stdout == ""
    assert taken.read_text() == "{}"
    assert list(ssd.iterdir()) == []
    assert run_lohan("profile").exit_code == 2


def test_several_drives_and_their_troubles_are_shown(
    ssd: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = profile(drives=(drive("/mnt/a"), drive("/mnt/b", write=2e9, lasting=1e9)))
    monkeypatch.setattr("lohan.measure.profile_machine", lambda **_: (shown, "kept in a file"))
    text = run_lohan("profile", "--ssd", ssd).stdout
    assert "Big GPU (cuda:0), Fast One (cores: 8)" in text
    assert "measured on 2026-03-01 12:30 UTC; kept in a file" in text
    assert "all together" in text
    assert "blocks of 1.0 MiB, 32 in flight, simplex" in text
    assert "1.25x slower with both ways busy" in text
    assert "100 TFLOP/s" in text
    assert "its fast cache is full" in text.replace("\n", " ")
    assert "note: beware" in text
    assert "bottleneck: " in text


def test_a_machine_too_small_for_anything_says_so(
    ssd: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = profile()
    tiny = profile(machine=shown.machine.with_ram(2**20).with_gpu_memory(2**20))
    monkeypatch.setattr("lohan.measure.profile_machine", lambda **_: (tiny, "kept"))
    assert "None of the models tried fits" in run_lohan("profile", "--ssd", ssd).stdout
    assert run_lohan("profile", "--ssd", ssd, "--json").fields["meaning"] is None


RUN = "from lohan.cli import main; main()"


@pytest.mark.slow
def test_an_order_to_end_removes_the_files(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ssd"
    path.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "profile", "--ssd", str(path), "--device", "cpu"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if "block size" in line:
                break
        num_files = len(list(path.iterdir()))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=840)
    assert num_files == 1
    assert process.returncode == 128 + signal.SIGTERM
    assert list(path.iterdir()) == []
    assert not (tmp_path / "cache").exists()


def test_a_profile_is_valid_json_on_disk(ssd: pathlib.Path) -> None:
    run(ssd)
    (kept,) = (ssd.parent / "cache/lohan").iterdir()
    assert json.loads(kept.read_text())["version"] == 2
