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
from support.fork_server import run_forked
from support.preference_runs import judged, pairs
from support.signalled import when

PROGRAM = pathlib.Path(__file__).parents[1] / "support" / "lohan_with_small_engine.py"
# Where a run is killed: after one of these words is printed, and how much later at most; how often
# in a short test and in a long one.
KILLS = [
    ((), 5.0, 1, 4),  # importing, reading rows
    (("rows of the form",), 2.0, 1, 3),  # tokenizing, tracing, taking weights in, the first seal
    (("training",), 0.6, 2, 8),  # steps and seals
    (("step 24/", "after step 24 of 24"), 0.3, 1, 4),  # the last seal, the model
    (("done after",), 0.0, 1, 1),  # the report
]


TASKS = {
    "pretrain": [{"text": f"{row['prompt']}{row['chosen']}"} for row in pairs(24)],
    "kto": judged(24),
    **dict.fromkeys(("dpo", "reward", "orpo", "cpo"), pairs(24)),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("killed")
    tiny_chat.save_model(folder / "model", attention_dropout=0.1)
    tiny_chat.write_jsonl(folder / "rows.jsonl", tiny_chat.conversations(24))
    tiny_chat.save_model(folder / "without-dropout")
    for task, rows in TASKS.items():
        tiny_chat.write_jsonl(folder / f"{task}.jsonl", rows)
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
    if more[:1] == ("--task",):
        # Fewer steps; and KTO computes a second forward apart, which with dropout is refused.
        words |= {"model": place / "without-dropout", "data": place / f"{more[1]}.jsonl"}
        words |= {"max_steps": 6}  # of texts that are packed an epoch has one step
        del words["pad_to_multiple_of"]
    given = [str(word) for key, value in words.items() for word in (f"--{key}", value)]
    return ["train", *given, *more]


def run(
    place: pathlib.Path,
    name: str,
    *more: str,
    signalled: Mapping[str, str] | None = None,
    is_forked: bool = True,
) -> tuple[int, str]:
    """Exit code and output. Forked from a process that has imported everything, or not."""
    words = command(place, name, *more)
    if is_forked:
        done = run_forked("support.lohan_with_small_engine", words, env=signalled)
        return done.returncode, done.stdout
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(signalled or {})},
    )
    return done.returncode, done.stdout


def finish(place: pathlib.Path, name: str, *more: str, is_forked: bool = True) -> None:
    code, output = run(place, name, *more, is_forked=is_forked)
    assert code == 0, output


def weights_hash(out: pathlib.Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(place: pathlib.Path) -> str:
    finish(place, "undisturbed")
    return weights_hash(place / "undisturbed")


def how_to_go_on(out: pathlib.Path) -> list[str]:
    return ["--resume"] if (out / "_lohan" / "run.json").exists() else []


def killed_after(
    place: pathlib.Path, name: str, words: tuple[str, ...], seconds: float, *, is_forked: bool
) -> bool:
    """Go on with the run and kill it; False if it was done before that."""
    code, output = run(
        place,
        name,
        *how_to_go_on(place / name),
        signalled=when(words, signal.SIGKILL, seconds),
        is_forked=is_forked,
    )
    assert code in (0, -signal.SIGKILL, -signal.SIGALRM), output
    return code != 0


def kill_and_finish(place: pathlib.Path, name: str, *, is_long: bool) -> int:
    """Instants are drawn within stages, so that none is spared: starting, training, exporting."""
    draw = random.Random(5)
    num_kills = 0
    for words, longest_seconds, *counts in KILLS:
        for _ in range(counts[is_long]):
            # A machine may be so fast that all is over by then: sooner, and in the end at once.
            num_kills += any(
                killed_after(
                    place,
                    name,
                    words,
                    share * draw.uniform(0.0, longest_seconds),
                    is_forked=not is_long,
                )
                for share in (1.0, 0.3, 0.1, 0.0)
            )
    finish(place, name, *how_to_go_on(place / name))
    return num_kills


@pytest.mark.slow
def test_a_run_killed_in_every_stage_ends_with_the_same_bits(
    place: pathlib.Path, undisturbed: str
) -> None:
    assert kill_and_finish(place, "killed", is_long=False) == 6
    assert weights_hash(place / "killed") == undisturbed


@pytest.mark.long
def test_a_run_killed_at_twenty_random_instants_ends_with_the_same_bits(
    place: pathlib.Path, undisturbed: str
) -> None:
    assert kill_and_finish(place, "killed-often", is_long=True) == 20
    assert weights_hash(place / "killed-often") == undisturbed


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


def kill_task(place: pathlib.Path, task: str, stages: list[tuple[tuple[str, ...], float]]) -> None:
    """A run of a task killed in each stage ends with the weights of one that was not."""
    finish(place, f"{task}-whole", "--task", task)
    name, draw, num_kills = f"{task}-killed", random.Random(task), 0
    for words, longest_seconds in stages:
        seconds = draw.uniform(0.0, longest_seconds)
        more = ("--task", task, *how_to_go_on(place / name))
        code, output = run(place, name, *more, signalled=when(words, signal.SIGKILL, seconds))
        assert code in (0, -signal.SIGKILL, -signal.SIGALRM), output
        num_kills += code != 0
    finish(place, name, "--task", task, *how_to_go_on(place / name))
    assert num_kills > 0
    assert weights_hash(place / name) == weights_hash(place / f"{task}-whole")


# The long test below kills all; test_preferences ends tasks after a seal and goes on with them.
@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "pretrain"])
def test_a_killed_run_of_a_task_ends_with_the_same_bits(place: pathlib.Path, task: str) -> None:
    kill_task(place, task, [(("step 2/",), 0.1)])


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_a_task_killed_in_every_stage_ends_with_the_same_bits(
    place: pathlib.Path, task: str
) -> None:
    # Of DPO and KTO the second stage has the reference computed.
    stages = [((), 5.0), (("computing the reference", "training"), 0.3), (("step 1/",), 0.2)]
    kill_task(place, f"{task}", [*stages, (("step 3/",), 0.3), (("step 6/",), 0.3)])
