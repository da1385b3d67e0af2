"""A training process killed with SIGKILL at any instant goes on from its last seal, to the bit."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]


def run_kills(place: pathlib.Path, device: str, num_rounds: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "support.killed_training", str(place), device, str(num_rounds)],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
        timeout=840,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_training_that_is_killed_goes_on_from_its_last_seal(
    device: str, num_kills: int, tmp_path: pathlib.Path
) -> None:
    assert run_kills(tmp_path, device, num_kills) == f"{num_kills} kills\n"
