"""A process killed at any instant of an export leaves a whole model or none."""

import pathlib
import signal

import pytest

from lohan.train.weights.check_export import check_model_directory
from support.fork_server import run_forked
from support.model_directories import save_model


@pytest.mark.slow
def test_an_export_killed_at_any_instant_leaves_no_half_model(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    done = run_forked("support.killed_exports", [str(tmp_path / "source"), str(out), "3"])
    assert done.returncode == 0, done.stdout
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
