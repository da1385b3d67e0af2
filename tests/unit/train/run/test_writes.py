"""`offload.write_budget`: planned for, refused beforehand where it cannot be kept, never passed."""

import pathlib
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from trl import SFTConfig

from lohan.engine.planning.write_limit import written_by_seal
from lohan.errors import DoesNotFit
from lohan.train.run.plan_summary import plan_in_words
from lohan.train.run.writes import planned_seals, planned_steps, write_limit_of
from lohan.train.trainer.trainer import SFTTrainer
from lohan.units import MIB
from support import tiny_chat
from support.plain_engine import attach_plainly
from support.trainer_engines import attach_small

ROWS = tiny_chat.conversations(9)
WIDE = {"hidden_size": 128, "intermediate_size": 256}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make(folder: pathlib.Path, *, offload: dict[str, Any], **changes: Any) -> SFTTrainer:
    settings: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "max_grad_norm": 0.5,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "pad_to_multiple_of": 16,
    }
    return SFTTrainer(
        tiny_chat.model(**WIDE),
        SFTConfig(output_dir=str(folder / "out"), **{**settings, **changes}),
        train_dataset=datasets.Dataset.from_list(ROWS),
        processing_class=tiny_chat.tokenizer(),
        offload={"ssd": str(folder / "ssd"), **offload},
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"num_train_epochs": 2},
        {"num_train_epochs": 0.4, "gradient_accumulation_steps": 2},
        {"num_train_epochs": 2, "gradient_accumulation_steps": 3, "dataloader_drop_last": True},
        {"max_steps": 3},
    ],
)
def test_the_length_of_a_run_is_known_before_it_begins(
    changes: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)
    trainer = make(tmp_path, offload={}, **changes)
    before = planned_steps(trainer)
    trainer.train()
    assert before == trainer.state.max_steps == trainer.state.global_step


@pytest.mark.parametrize(
    ("changes", "num_seals"),
    [
        ({"save_steps": 4}, 3),
        ({"save_steps": 0.5}, 2),
        ({"save_strategy": "no"}, 1),
        ({"save_strategy": "epoch", "num_train_epochs": 3}, 3),
    ],
)
def test_seals_are_counted(changes: dict[str, Any], num_seals: int, tmp_path: pathlib.Path) -> None:
    assert planned_seals(make(tmp_path, offload={}, **changes), 10) == num_seals
    archiving = make(tmp_path, offload={"archive_steps": 5}, **changes)
    assert planned_seals(archiving, 10) == num_seals + 2


def test_a_budget_that_cannot_be_kept_is_refused_before_anything_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    trainer = make(tmp_path, offload={"ram": 12 * MIB, "write_budget": 2 * MIB}, max_steps=40)
    with pytest.raises(DoesNotFit, match=r"2\.1 MB are allowed \(write_budget\)"):
        trainer.train()
    assert not list((tmp_path / "ssd").iterdir())
    assert not (tmp_path / "out" / "_lohan" / "run.json").exists()


def test_a_resumed_run_has_written_what_the_one_before_had(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the seal it ended with, which writes what lives in RAM."""
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    trainer = make(tmp_path, offload={}, max_steps=1)
    trainer.train()
    written_bytes, seal_bytes = trainer.written_bytes, written_by_seal(trainer.engine.plan)
    trainer.close()
    assert seal_bytes > 0
    resumed = make(tmp_path, offload={}, max_steps=1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.written_bytes == written_bytes
    resumed.close()


def test_a_run_within_its_budget_writes_what_was_predicted_and_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    trainer = make(tmp_path, offload={"ram": 12 * MIB}, max_steps=4, save_steps=2)
    trainer.train()
    limit_bytes = trainer.written_bytes + 2 * MIB
    trainer.close()
    limited = make(
        tmp_path / "limited",
        offload={"ram": 12 * MIB, "write_budget": limit_bytes},
        max_steps=4,
        save_steps=2,
    )
    limited.train()
    assert limited.stopped_because is None
    assert limited.state.global_step == 4
    assert limited.written_bytes <= limit_bytes
    limit, engine = write_limit_of(limited), limited.engine
    assert limit is not None
    predicted = limit.run_bytes(engine.plan, engine.prediction.written_bytes)
    # Whole pages, and pieces of updates, make it a little more.
    assert predicted == pytest.approx(limited.written_bytes, rel=0.05)
    words = "\n".join(plan_in_words(engine.plan, engine.prediction, num_steps=4, write_limit=limit))
    assert "write budget: " in words
    limited.close()
