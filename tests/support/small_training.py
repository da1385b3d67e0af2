"""`lohan train` on a tiny model, as a user runs it, with the engine's contract in plain PyTorch."""

import pathlib

import pytest

from support import tiny_chat
from support.command_line import Ran, run_lohan
from support.plain_engine import attach_plainly


def make_place(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with a model, rows and an SSD directory; no hub, and no machine is measured."""
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny_chat.save_model(folder / "model")
    tiny_chat.write_jsonl(folder / "rows.jsonl", tiny_chat.conversations(10))
    (folder / "ssd").mkdir()
    return folder


def train(place: pathlib.Path, *words: str, **changes: str) -> Ran:
    given = {
        "model": str(place / "model"),
        "data": str(place / "rows.jsonl"),
        "ssd": str(place / "ssd"),
        "out": str(place / "out"),
        "device": "cpu",
        "max_steps": "3",
        "per_device_train_batch_size": "2",
        "gradient_accumulation_steps": "2",
        "assistant_only_loss": "true",
        **changes,
    }
    return run_lohan(
        "train", *[word for key, value in given.items() for word in (f"--{key}", value)], *words
    )
