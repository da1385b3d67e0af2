"""`lohan data preview` as a user runs it."""

import pathlib
import subprocess
import sys

import pytest

from support.command_line import run_lohan
from support.small_training import make_place


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    return make_place(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "-3"], "--rows"),
        (["--max_length", "-5"], "max_length is -5"),
        (["--chat_template_path", "TEMPLATE"], "cannot be read"),
    ],
)
def test_the_preview_refuses_what_cannot_be_meant(
    place: pathlib.Path, words: list[str], said: str
) -> None:
    (place / "TEMPLATE").write_bytes(b"\xed\xed\xff")
    words = [str(place / "TEMPLATE") if word == "TEMPLATE" else word for word in words]
    done = run_lohan("data", "preview", place / "rows.jsonl", "--model", place / "model", *words)
    assert done.exit_code == 2
    assert said in done.stderr


def test_the_preview_marks_what_is_trained_on(place: pathlib.Path) -> None:
    done = run_lohan(
        "data",
        "preview",
        place / "rows.jsonl",
        "--model",
        place / "model",
        "--rows",
        "1",
        "--assistant_only_loss",
        "true",
        "--max_length",
        "20",
    )
    assert done.exit_code == 0, done.stderr
    assert "[loss]" in done.stdout
    assert "<|end|>[/loss]" in done.stdout
    assert "10 rows of the form messages" in done.stdout
    assert "longer than max_length=20" in done.stdout


@pytest.mark.slow
def test_no_progress_bars_are_written_where_nobody_watches(place: pathlib.Path) -> None:
    words = ("data", "preview", place / "rows.jsonl", "--model", place / "model")
    done = subprocess.run(
        [sys.executable, "-c", "from lohan.cli import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    code = (
        "import sys; sys.argv = ['lohan', '--version']\nfrom lohan.cli import main\ntry: main()\n"
    )
    code += "except SystemExit: pass\nfrom tqdm.auto import tqdm; list(tqdm(range(3)))"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert shown.stderr == ""
