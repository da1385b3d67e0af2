"""`lohan train` on the test accelerator, killed or failing under queued kernels, and resumed."""

import hashlib
import re
import signal
from pathlib import Path

import pytest

from support import accelerator, tiny_chat
from support.fork_server import run_forked

NUM_STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    tiny_chat.save_model(folder / "model", attention_dropout=0.1)
    tiny_chat.write_jsonl(folder / "rows.jsonl", tiny_chat.conversations(16))
    return folder


def train(place: Path, name: str, *more: str, end_at: str = "") -> tuple[int, str]:
    """Exit code and output."""
    (place / f"ssd-{name}").mkdir(exist_ok=True)
    words = {
        "model": place / "model",
        "data": place / "rows.jsonl",
        "ssd": place / f"ssd-{name}",
        "out": place / name,
        "device": f"{accelerator.NAME}:0",
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": "1e-3",
        "save_steps": 1,
        "pad_to_multiple_of": 16,
    }
    pairs = [str(word) for key, value in words.items() for word in (f"--{key}", value)]
    done = run_forked(
        "support.lohan_on_accelerator", ["train", *pairs, *more], env={"END_AT": end_at}
    )
    return done.returncode, done.stdout


def finished(place: Path, name: str, *more: str) -> str:
    """The weights of a run that ends well."""
    code, output = train(place, name, *more)
    assert code == 0, output
    return hashlib.sha256((place / name / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> str:
    return finished(place, "undisturbed")


def test_a_run_killed_under_queued_kernels_ends_with_the_same_bits(
    place: Path, undisturbed: str
) -> None:
    for end_at, more in (("kill 2 forward", ()), ("kill 2 backward", ("--resume",))):
        code, output = train(place, "killed", *more, end_at=end_at)
        assert code == -signal.SIGKILL, output
    assert finished(place, "killed", "--resume") == undisturbed


def test_a_kernel_that_fails_is_told_with_its_task_and_nothing_sealed_is_lost(
    place: Path, undisturbed: str
) -> None:
    code, output = train(place, "failed", end_at="fail 2 backward")
    assert code > 0, output
    assert "an illegal memory access" in output
    assert "are sealed at step 1 and stay" in output
    # The backward itself, or a task behind it: whoever asks first.
    assert re.search(r"at: +in .+ on lane \w+", output), output
    assert finished(place, "failed", "--resume") == undisturbed
