"""Matrix tiles that a processor shows and a machine does not run, acted out: the probe says no."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from lohan import _native, matrix_tiles
from lohan.device import open_device
from lohan.doctor import Level
from lohan.doctor.software import examine_tiles
from lohan.matrix_tiles import leave_out_broken_tiles

ONEDNN, MKL = "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
LIMITS = {ONEDNN: "AVX512_CORE_FP16", MKL: "AVX512_E3"}
SIGILL = "Illegal instruction"

# Any Python program, on a machine whose tiles end whoever uses them.
ON_SUCH_A_MACHINE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("lohan._native", {_native.__file__!r})
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
native.probe_tiles = lambda: "{SIGILL}"
sys.modules["lohan._native"] = native
"""


def run_there(code: str, **variables: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in LIMITS}
    done = subprocess.run(
        [sys.executable, "-c", ON_SUCH_A_MACHINE + code],
        env=environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("found", ["none", "run"])
def test_nothing_is_limited_where_there_are_no_tiles_or_they_run(found: str) -> None:
    environ: dict[str, str] = {}
    assert leave_out_broken_tiles(environ, lambda: found) == ""
    assert environ == {}


@pytest.mark.parametrize("found", [SIGILL, "Killed", "no end after 5 s", "no process for a try"])
def test_tiles_that_are_not_known_to_run_are_left_out(found: str) -> None:
    environ: dict[str, str] = {}
    said = leave_out_broken_tiles(environ, lambda: found)
    assert environ == LIMITS
    assert found in said
    assert all(f"{name}={value}" in said for name, value in LIMITS.items())


def test_lower_limits_of_the_user_stay_and_higher_ones_are_lowered_and_named() -> None:
    environ = {ONEDNN: "avx2", MKL: "AVX512_E4"}
    said = leave_out_broken_tiles(environ, lambda: SIGILL)
    assert environ == {ONEDNN: "avx2", MKL: "AVX512_E3"}
    assert "AVX512_E3 in place of AVX512_E4" in said
    assert ONEDNN not in said


@pytest.mark.parametrize("value", ["ALL", "DEFAULT", "AVX512_CORE_AMX", "AVX10_1_512_AMX", "typo"])
def test_what_lets_tiles_through_is_lowered(value: str) -> None:
    environ = {ONEDNN: value}
    leave_out_broken_tiles(environ, lambda: SIGILL)
    assert environ == LIMITS


def test_a_child_of_a_limited_process_tries_nothing_and_says_nothing() -> None:
    def probe() -> str:
        raise AssertionError("tried again")

    environ = dict(LIMITS)
    assert leave_out_broken_tiles(environ, probe) == ""
    assert environ == LIMITS


def test_the_real_probe_answers_as_the_processor_says() -> None:
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    if "amx_tile" not in cpuinfo:
        assert _native.probe_tiles() == "none"
    else:
        assert _native.probe_tiles() in ("run", SIGILL)


def test_devices_that_compute_on_the_processor_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_tiles, "NOTE", "matrix tiles do not run")
    for name in ("cpu", "emulated"):
        with open_device(name) as device:
            assert device.reason == f"'{name}' was asked for; matrix tiles do not run"


def test_the_doctor_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LIMITS.items():
        monkeypatch.setenv(name, value)
    for answer, level in (("none", Level.FINE), ("run", Level.FINE), (SIGILL, Level.NOTE)):
        monkeypatch.setattr(_native, "probe_tiles", lambda answer=answer: answer)
        found = examine_tiles()
        assert found.level is level
    assert SIGILL in found.found
    assert f"{ONEDNN}=AVX512_CORE_FP16" in found.found
    assert found.remedy


@pytest.mark.parametrize("door", ["lohan", "lohan.cli", "lohan.units"])
def test_every_way_in_limits_the_process_and_its_children(door: str) -> None:
    shown = run_there(
        f"import {door}, subprocess\n"
        "code = 'import json, os; print(json.dumps(dict(os.environ)))'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)"
    )
    environ = json.loads(shown)
    assert {name: environ.get(name) for name in LIMITS} == LIMITS


def test_importing_torch_first_is_early_enough_and_a_run_says_it_once() -> None:
    # AVX2 stands for a limit, so that obeying it shows on processors without tiles too.
    shown = run_there(
        "import torch, lohan\n"
        "from lohan.device import open_device\n"
        "print(open_device('cpu').reason)\n"
        "import os\n"
        f"os.environ['{ONEDNN}'] = 'AVX2'\n"
        "one = torch.ones(64, 64)\n"
        "torch.mkldnn_max_pool2d(one.view(1, 1, 64, 64).to_mkldnn(), 2)",
        ONEDNN_VERBOSE="1",
    )
    assert shown.count("do not run here (Illegal instruction)") == 1
    (used,) = [line for line in shown.splitlines() if ",cpu,isa:" in line]
    assert used.endswith("isa:Intel AVX2")
