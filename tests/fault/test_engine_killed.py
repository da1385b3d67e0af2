"""A training process killed with SIGKILL at any instant goes on from its last seal, to the bit."""

import pathlib

import pytest

from support.fork_server import run_forked


def run_kills(place: pathlib.Path, device: str, num_rounds: int) -> str:
    done = run_forked("support.killed_training", [str(place), device, str(num_rounds)])
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_training_that_is_killed_goes_on_from_its_last_seal(
    device: str, num_kills: int, tmp_path: pathlib.Path
) -> None:
    assert run_kills(tmp_path, device, num_kills) == f"{num_kills} kills\n"
