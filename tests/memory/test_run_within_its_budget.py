"""RAM of `lohan train` and `lohan export`, seen from outside: within the budget in every phase."""

import pathlib
import sys

import pytest

from lohan.units import MIB
from support import tiny_chat
from support.watched_memory import peaks_of

PROGRAM = pathlib.Path(__file__).parents[1] / "support" / "lohan_with_small_engine.py"
LARGE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
NUM_PARAMETERS = 29_901_312
RAM_MIB, GPU_MIB = 104, 56
# The device is the processor: both budgets are main memory.
BUDGET_BYTES = (RAM_MIB + GPU_MIB) * MIB
# Memory of the small run that the budget of the large one pays for as well: scratch and buffers.
SHARED_BYTES = 4 * MIB
FIRST = [
    ("rows of the form", "load"),
    ("training begins", "train"),
    ("step 2/", "archive"),
    ("sealed at step 2", "train on"),
    ("step 3/", "seal and export"),
]
AGAIN = [("rows of the form", "open"), ("training continues", "train"), ("step 3/", "export")]


def train(
    place: pathlib.Path, name: str, *more: str | pathlib.Path, out: str = "out"
) -> list[str | pathlib.Path]:
    words = {
        "model": place / f"{name}-model",
        "data": place / "rows.jsonl",
        "ssd": place / f"{name}-ssd",
        "out": place / f"{name}-{out}",
        "device": "cpu",
        "ram": f"{RAM_MIB}MiB",
        "gpu": f"{GPU_MIB}MiB",
        "max_steps": 3,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "save_steps": 2,
        "offload.archive_steps": 2,
    }
    pairs = [str(word) for key, value in words.items() for word in (f"--{key}", value)]
    return [sys.executable, PROGRAM, "train", *pairs, *more]


def export(place: pathlib.Path, name: str) -> list[str | pathlib.Path]:
    found = (place / f"{name}-out", "--out", place / f"{name}-exported")
    return [sys.executable, PROGRAM, "export", *found]


@pytest.mark.slow
def test_ram_stays_within_the_budget_in_every_phase(tmp_path: pathlib.Path) -> None:
    for name in ("small", "large"):
        (tmp_path / f"{name}-ssd").mkdir()
    tiny_chat.save_model(tmp_path / "small-model")
    tiny_chat.save_model(tmp_path / "large-model", **LARGE)
    tiny_chat.write_jsonl(tmp_path / "rows.jsonl", tiny_chat.conversations(6))
    bare = max(peaks_of(train(tmp_path, "small"), FIRST).values()) - SHARED_BYTES
    first = peaks_of(train(tmp_path, "large"), FIRST)
    archive = tmp_path / "large-out" / "checkpoint-2"
    again = peaks_of(train(tmp_path, "large", "--resume-from", archive, out="again"), AGAIN)
    assert 12 * NUM_PARAMETERS > 2 * BUDGET_BYTES, "the states must not fit"
    for run, peaks in (("first", first), ("resumed", again)):
        growth = {phase: round((peak - bare) / MIB) for phase, peak in peaks.items()}
        print(run, growth, "MiB")
        assert max(peaks.values()) - bare <= BUDGET_BYTES, (run, growth)
    # Exporting needs a tensor at a time.
    bare = max(peaks_of(export(tmp_path, "small"), []).values())
    exported = max(peaks_of(export(tmp_path, "large"), []).values())
    print("export", round((exported - bare) / MIB), "MiB")
    assert exported - bare <= 64 * MIB
