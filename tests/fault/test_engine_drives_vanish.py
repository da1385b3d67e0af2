"""Drives that are gone, or have become full, while a run goes on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lohan.errors import CheckpointError, LohanError, StorageError
from support.engine_faults import (
    Disturbed,
    everything_moves,
    go_on,
    make_device,
    undisturbed,
    watched,
)
from support.engine_runs import attach, batches_of, build, optimizer_for
from support.full_drive_training import NOT_PERMITTED

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("gone", ["ssd0", "ssd1"])
def test_a_drive_that_is_away_for_a_while_is_told_and_the_seal_is_whole(
    device: str, gone: str, tmp_path: Path
) -> None:
    """Open files outlive their directory, so steps go on; a seal, a larger plan, cannot."""
    case = everything_moves(device, num_ssds=2)
    expected = undisturbed(case, tmp_path)
    model = build(case)
    steps = batches_of(case)
    with (
        watched(),
        make_device(device) as own,
        attach(case, model, optimizer_for(case, model), tmp_path, device=own) as engine,
    ):
        engine.step(steps[0])
        engine.seal()
        engine.step(steps[1])
        (tmp_path / gone).rename(tmp_path / "away")
        with pytest.raises((StorageError, CheckpointError), match=gone):
            engine.seal()
        assert engine.sealed is not None
        assert engine.sealed.step == 1
        with pytest.raises(StorageError, match=gone):
            engine.step([*steps[2], *steps[2]])
        told = Disturbed(run_id=engine.run_id, sealed=1)
    (tmp_path / "away").rename(tmp_path / gone)
    go_on(case, tmp_path, told, expected)


def test_a_run_whose_drive_was_wiped_ends_clearly_and_cannot_be_taken_up(tmp_path: Path) -> None:
    case = everything_moves("emulated", num_ssds=2)
    model = build(case)
    steps = batches_of(case)
    with watched():
        with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
            engine.step(steps[0])
            engine.seal()
            shutil.rmtree(tmp_path / "ssd1")
            with pytest.raises(LohanError, match="ssd1"):
                engine.seal()
            run_id = engine.run_id
        again = build(case)
        with pytest.raises(StorageError, match="ssd1"):
            attach(case, again, optimizer_for(case, again), tmp_path, run=run_id)


@pytest.mark.slow
def test_a_seal_on_a_full_drive_fails_and_can_be_made_when_there_is_room(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("unshare and mount are not installed")
    options = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    done = subprocess.run(
        ["unshare", *options, sys.executable, "-m", "support.full_drive_training", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
        timeout=840,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode == NOT_PERMITTED or done.stderr.startswith("unshare:"):
        pytest.skip("this system permits no private mounts")
    assert done.returncode == 0, done.stderr
