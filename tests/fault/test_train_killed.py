"""`lohan train` ended by SIGKILL, SIGTERM and Ctrl-C at instants nobody chose, and resumed."""

import hashlib
import os
import pathlib
import random
import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest

from support import tiny_chat
from support.signalled import when

PROGRAM = pathlib.Path(__file__).parents[1] / "support" / "lohan_with_small_engine.py"
# Where a run is killed: after one of these words is printed, how often, and how much later at most.
KILLS = [
    ((), 4, 5.0),  # importing, reading rows
    (("rows of the form",), 3, 2.0),  # tokenizing, tracing, taking the weights in, the first seal
    (("training",), 8, 0.6),  # steps and seals
    (("step 24/", "after step 24 of 24"), 4, 0.3),  # the last seal, the model
    (("done after",), 1, 0.0),  # the report
]
NUM_KILLS = sum(count for _, count, _ in KILLS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("killed")
    tiny_chat.save_model(folder / "model", attention_dropout=0.1)
    tiny_chat.write_jsonl(folder / "rows.jsonl", tiny_chat.conversations(24))
    return folder


def command(place: pathlib.Path, name: str, *more: str) -> list[str]:
    (place / f"ssd-{name}").mkdir(exist_ok=True)
    words = {
        "model": place / "model",
        "data": place / "rows.jsonl",
        "ssd": place / f"ssd-{name}",
        "out": place / name,
        "device": "cpu",
        "num_train_epochs": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": "1e-3",
        "save_steps": 1,
        "pad_to_multiple_of": 16,
    }
    pairs = [str(word) for key, value in words.items() for word in (f"--{key}", value)]
    return [sys.executable, str(PROGRAM), "train", *pairs, *more]


def run(
    place: pathlib.Path, name: str, *more: str, signalled: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and output."""
    done = subprocess.run(
        command(place, name, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(signalled or {})},
    )
    return done.returncode, done.stdout


def finish(place: pathlib.Path, name: str, *more: str) -> None:
    code, output = run(place, name, *more)
    assert code == 0, output


def weights_hash(out: pathlib.Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(place: pathlib.Path) -> str:
    finish(place, "undisturbed")
    return weights_hash(place / "undisturbed")


def how_to_go_on(out: pathlib.Path) -> list[str]:
    return ["--resume"] if (out / "_lohan" / "run.json").exists() else []


def killed_after(place: pathlib.Path, words: tuple[str, ...], seconds: float) -> bool:
    """Go on with the run and kill it; False if it was done before that."""
    code, output = run(
        place,
        "killed",
        *how_to_go_on(place / "killed"),
        signalled=when(words, signal.SIGKILL, seconds),
    )
    assert code in (0, -signal.SIGKILL, -signal.SIGALRM), output
    return code != 0


@pytest.mark.slow
def test_a_run_killed_at_twenty_random_instants_ends_with_the_same_bits(
    place: pathlib.Path, undisturbed: str
) -> None:
    """Instants are drawn within stages, so that none is spared: starting, training, exporting."""
    draw = random.Random(5)
    num_kills = 0
    for words, count, longest_seconds in KILLS:
        for _ in range(count):
            # A machine may be so fast that all is over by then: sooner, and in the end at once.
            num_kills += any(
                killed_after(place, words, share * draw.uniform(0.0, longest_seconds))
                for share in (1.0, 0.3, 0.1, 0.0)
            )
    assert num_kills == NUM_KILLS == 20
    finish(place, "killed", *how_to_go_on(place / "killed"))
    assert weights_hash(place / "killed") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_seals_says_so_and_a_resume_ends_with_the_same_bits(
    place: pathlib.Path, undisturbed: str, number: signal.Signals, code: int
) -> None:
    name = f"stopped-{number}"
    ended, output = run(place, name, signalled=when(["step 2/"], number))
    assert ended == code, output
    assert "stopped and sealed at step" in output
    assert "--resume" in output
    finish(place, name, "--resume")
    assert weights_hash(place / name) == undisturbed
