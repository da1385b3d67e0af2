"""`scripts/torture`: what breaks a promise is said, and a torture goes on where it stopped."""

import json
import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "scripts"))
from torturing import judge
from torturing.children import Ended
from torturing.flips import _sealed_ranges
from torturing.places import Run, Undisturbed
from torturing.totals import Totals, read_totals

REFUSED = "error: it is full\n  why: no space is left\n  do:  free some\n"


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Ended(code=0, output="done"), None),
        (Ended(code=2, output=REFUSED), None),
        (Ended(code=2, output="error: it is full\n"), "refused without"),
        (Ended(code=1, output="no"), "exit code 1"),
        (Ended(code=143, output=""), "exit code 143"),
        (Ended(code=2, output="Traceback (most recent call last):\n" + REFUSED), "a traceback"),
        (Ended(code=0, output="", num_left=2), "2 processes outlived it"),
        (Ended(code=0, output="", is_late=True), "it hung"),
        (Ended(code=0, output="", temporary=["x"]), "temporary files"),
    ],
)
def test_how_a_command_ended_is_judged(ended: Ended, words: str | None) -> None:
    wrong = judge.of_ending(ended)
    assert (wrong == []) if words is None else any(words in sentence for sentence in wrong)


def test_a_signal_may_stop_a_run_that_says_so() -> None:
    said = "training begins at step 0\nstopped and sealed at step 3"
    assert judge.of_ending(Ended(code=143, output=said), may_stop=True) == []
    silent = Ended(code=143, output="training begins at step 0")
    assert "without a word" in judge.of_ending(silent, may_stop=True)[0]


def ended_run(folder: pathlib.Path) -> tuple[Run, Undisturbed]:
    out, ssd = folder / "out", folder / "ssd0"
    (out / "_lohan").mkdir(parents=True)
    (ssd / "lohan-12345678").mkdir(parents=True)
    (ssd / "lohan-12345678" / "states.0.bin").write_bytes(b"s")
    (out / "model.safetensors").write_bytes(b"w")
    (out / "_lohan" / "log.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 1}\n')
    run = Run(variant="plain", folder=folder, out=out, ssd=(ssd,), given=folder)
    names = judge.files_of(run)
    return run, Undisturbed(weights=b"w", losses={1: 0.5}, files=names, num_calls=1, seconds=1.0)


def test_what_a_run_ends_with_is_compared_to_the_byte(tmp_path: pathlib.Path) -> None:
    run, expected = ended_run(tmp_path)
    assert judge.of_result(run, expected) == []
    (run.out / "model.safetensors").write_bytes(b"v")
    (run.out / "_lohan" / "log.jsonl").write_text('{"step": 1, "loss": 0.5000001}\n')
    (run.out / ".left.tmp").write_bytes(b"")
    (tmp_path / ".out.old").mkdir()
    wrong = " ".join(judge.of_result(run, expected))
    for words in ("weights are not", "loss of step 1", ".left.tmp", ".out.old"):
        assert words in wrong


def test_sealed_bytes_of_a_drive_are_those_of_the_format(tmp_path: pathlib.Path) -> None:
    stripe = {"chunk_bytes": 8192, "pattern": [0, 1]}
    part = {"extents": [[0, 4096], [4096, 16384]]}
    manifest = {"file": {"stripe": stripe}, "blocks": [{"slot": 1, "parts": {"P16": part}}]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert _sealed_ranges(tmp_path / "states.0.bin") == [(4096, 8192), (8192, 12288)]
    assert _sealed_ranges(tmp_path / "states.1.bin") == [(0, 8192)]


def test_totals_go_on_where_they_stopped(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    totals, path = Totals(seed=5, next_life=3, seconds=1.5), tmp_path / "totals.json"
    totals.count("kills", "SIGKILL", 2)
    totals.note_wrong("kills", 2, "it was not so")
    assert "--seed 5 --life 2 --only kills" in capsys.readouterr().out
    totals.save(path)
    assert read_totals(path, None) == totals
    assert read_totals(path, 5).num_wrong == 1
    with pytest.raises(SystemExit, match="has seed 5"):
        read_totals(path, 6)
