"""The first command of the README without its set-up, on the model it makes without a network."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "examples" / "demo.py"
ROWS = ROOT / "examples" / "data" / "lighthouse.jsonl"


def run_demo(folder: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--random-model", "--out", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)


def test_the_rows_of_the_demo_share_one_habit() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    assert 40 <= len(rows) <= 80
    assert len({row["prompt"][1]["content"] for row in rows}) == len(rows)
    for row in rows:
        answer = row["completion"][0]["content"]
        assert answer.startswith("Ahoy! ")
        assert answer.endswith(" Fair winds!")


@pytest.mark.slow
def test_the_demo_shows_plan_loss_answers_and_files_and_a_second_one_takes_a_folder_of_its_own(
    tmp_path: pathlib.Path,
) -> None:
    folder = tmp_path / "demo"
    done = run_demo(folder, "--max_steps", "4", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("predicted", "step 4/", "the first 2 steps took", "before:", "after:"):
        assert words in done.stdout, words
    for name in ("model.safetensors", "report.html", "log.jsonl"):
        assert name in done.stdout
        assert (folder / "out" / name).is_file()
    assert "rm -r" in done.stdout
    again = run_demo(folder, "--max_steps", "1", "--device", "cpu")
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "demo-2" / "out" / "report.html").is_file()


@pytest.mark.slow
def test_a_wrong_argument_is_named_before_anything_else(tmp_path: pathlib.Path) -> None:
    done = run_demo(tmp_path / "demo", "--learning_rat", "1")
    assert done.returncode == 2
    assert "learning_rat" in done.stderr
    assert "asking" not in done.stdout


@pytest.mark.slow
def test_an_unfinished_demo_is_named_with_what_to_do(tmp_path: pathlib.Path) -> None:
    (tmp_path / "demo" / "out").mkdir(parents=True)
    (tmp_path / "demo" / "out" / "run.json").write_text("{}")
    done = run_demo(tmp_path / "demo")
    assert done.returncode == 1
    assert "--resume" in done.stdout
    assert "rm -r" in done.stdout
