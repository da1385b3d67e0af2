"""A process killed at any instant of an export leaves a whole model or none."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from lohan.train.weights.check_export import check_model_directory
from support.model_directories import save_model

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_an_export_killed_at_any_instant_leaves_no_half_model(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "support.killed_exports", tmp_path / "source", out, "3"],
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        check=True,
        capture_output=True,
        text=True,
    )
    rows = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(rows) > 10
    assert rows[-1][1:] == (0, 1)
    killed = rows[:-1]
    assert all(code == -signal.SIGKILL for _, code, _ in killed)
    assert not killed[0][2]
    there = [is_there for _, _, is_there in killed]
    assert there == sorted(there), "once it is there it stays"
    for path in out.iterdir():
        if not path.name.startswith("."):
            assert check_model_directory(path).problems == ()
