"""A process killed with SIGKILL at any point of update and seal resumes from its last seal."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]


def run_kills(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "support.killed_stores", *arguments],
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
def test_a_process_killed_at_random_instants_goes_on_from_its_last_seal(
    tmp_path: pathlib.Path,
) -> None:
    assert run_kills("instants", str(tmp_path), "15").endswith("steps\n")


@pytest.mark.slow
def test_a_process_killed_at_every_event_of_its_life_resumes_from_its_last_seal(
    tmp_path: pathlib.Path,
) -> None:
    num_points = int(run_kills("points", str(tmp_path)).split()[0])
    assert num_points > 100
