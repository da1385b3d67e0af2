"""The first command of the README without its set-up, on the model it makes without a network."""

import importlib.util
import json
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import ModuleType

import pytest

from support.demo_program import PROGRAM
from support.fork_server import run_forked
from support.left_runs import held_elsewhere, leave_run
from support.signalled import when

ROOT = pathlib.Path(__file__).parents[2]
ROWS = ROOT / "examples" / "data" / "lighthouse.jsonl"


def run_demo(
    folder: pathlib.Path, *words: str, signalled: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Forked; output and errors are one."""
    own = ["--random-model", "--out", str(folder), *words]
    return run_forked("support.demo_program", own, env=signalled)


def test_the_rows_of_the_demo_share_one_habit() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert 40 <= len(rows) <= 80
    assert len({row["prompt"][1]["content"] for row in rows}) == len(rows)
    for row in rows:
        answer = row["completion"][0]["content"]
        assert answer.startswith("Ahoy! ")
        assert answer.endswith(" Fair winds!")


@pytest.mark.slow
def test_the_demo_shows_plan_loss_answers_and_files(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "demo"
    done = run_demo(folder, "--max_steps", "4", "--device", "cpu")
    assert done.returncode == 0, done.stdout
    for words in ("predicted", "step 4/", "the first 2 steps took", "before:", "after:"):
        assert words in done.stdout, words
    for name in ("model.safetensors", "_lohan/report.html", "_lohan/log.jsonl"):
        assert name in done.stdout
        assert (folder / "out" / name).is_file()
    assert "rm -r" in done.stdout
    assert demo()._folder(folder) == tmp_path / "demo-2", "a second one has a folder of its own"


@pytest.mark.slow
def test_a_wrong_argument_is_named_before_anything_else(tmp_path: pathlib.Path) -> None:
    """By the command itself."""
    command = [sys.executable, PROGRAM, "--random-model", "--out", tmp_path / "demo"]
    done = subprocess.run(
        [*command, "--learning_rat", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "learning_rat" in done.stderr
    assert "asking" not in done.stdout


@pytest.mark.slow
def test_a_demo_that_was_killed_goes_on_and_one_killed_earlier_starts_anew(
    tmp_path: pathlib.Path,
) -> None:
    folder = tmp_path / "demo"
    words = ("--max_steps", "6", "--device", "cpu", "--save_steps", "1")
    # As left by one that was killed while its weights went to SSD: states without a seal.
    (folder / "ssd").mkdir(parents=True)
    leave_run([folder / "ssd"], "unsealed", step=None)
    killed = run_demo(folder, *words, signalled=when(["step 3/"], signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    assert not (folder / "ssd" / "lohan-unsealed").exists()
    run = (folder / "out" / "_lohan" / "run.json").read_text()
    done = run_demo(folder, *words)
    assert done.returncode == 0, done.stdout
    assert "going on with it" in done.stdout
    assert "step 1/" not in done.stdout
    assert "step 6/" in done.stdout
    assert (folder / "out" / "_lohan" / "run.json").read_text() == run
    assert (folder / "out" / "_lohan" / "report.html").is_file()


def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    ("files", "is_taken"),
    [
        ([], False),
        (["out/run.json", "ssd/lohan-1/lock"], False),
        (["random-model.unfinished/config.json"], False),
        (["out/run.json", "out/report.html"], True),
        (["thesis.tex"], True),
        (["out/run.json", "thesis.tex"], True),
    ],
)
def test_a_demo_goes_on_in_nothing_but_a_demo_that_was_cut_off(
    files: list[str], is_taken: bool, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "demo"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("kept")
    assert demo()._folder(folder) == (tmp_path / "demo-2" if is_taken else folder)
    assert all((folder / name).read_text() == "kept" for name in files)


def test_only_states_without_a_seal_that_nobody_holds_are_removed(tmp_path: pathlib.Path) -> None:
    ssd = tmp_path / "demo" / "ssd"
    ssd.mkdir(parents=True)
    leave_run([ssd], "sealed")
    leave_run([ssd], "unsealed", step=None)
    leave_run([ssd], "held", step=None)
    with held_elsewhere("held", ssd):
        demo()._folder(tmp_path / "demo")
    assert {path.name for path in ssd.iterdir()} == {"lohan-sealed", "lohan-held"}
