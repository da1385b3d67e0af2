"""Runs that are given another length when they are resumed, against runs that had it at once."""

import pathlib
from typing import Any

import datasets
import pytest
import torch
from transformers import TrainerCallback
from trl import SFTConfig

from lohan.errors import ConfigError
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat
from support.plain_engine import attach_plainly

ROWS = tiny_chat.conversations(14)  # four steps an epoch
EVERY_EPOCH = {"eval_strategy": "epoch"}
EVERY_TWO = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.fixture(autouse=True)
def _plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)


def make(folder: pathlib.Path, *callbacks: TrainerCallback, **changes: Any) -> SFTTrainer:
    settings: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_steps": 2,
        "neftune_noise_alpha": 5.0,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return SFTTrainer(
        # Dropout and noise, so that random numbers decide the weights.
        tiny_chat.model(attention_dropout=0.2),
        SFTConfig(output_dir=str(folder / "out"), **{**settings, **changes}),
        train_dataset=datasets.Dataset.from_list(ROWS),
        eval_dataset=datasets.Dataset.from_list(ROWS[:3]),
        processing_class=tiny_chat.tokenizer(),
        callbacks=list(callbacks),
        offload={"ssd": str(folder / "ssd")},
    )


def of_steps(trainer: SFTTrainer) -> list[tuple[float, float]]:
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [(entry["loss"], entry["learning_rate"]) for entry in logged]


def assert_same(one: SFTTrainer, other: SFTTrainer) -> None:
    assert one.state.global_step == other.state.global_step
    assert of_steps(one) == of_steps(other)
    first, second = dict(one.engine.weights()), dict(other.engine.weights())
    assert all(torch.equal(first[name], second[name]) for name in first | second)


@pytest.mark.parametrize(
    ("short", "long", "settings"),
    [
        ({"max_steps": 3}, {"max_steps": 6}, {}),
        ({"num_train_epochs": 1}, {"num_train_epochs": 2}, EVERY_EPOCH),
        # An evaluation at the end that the longer run does not make.
        ({"max_steps": 3}, {"max_steps": 6}, EVERY_TWO),
        ({"max_steps": 3}, {"max_steps": 6}, {**EVERY_EPOCH, "save_strategy": "epoch"}),
        # Falls, but not yet: the rate of the next step is that of the longer run.
        (
            {"max_steps": 3},
            {"num_train_epochs": 1.5},
            {"lr_scheduler_type": "linear", "warmup_steps": 2},
        ),
    ],
    ids=["steps", "epochs", "evaluated-at-the-end", "epoch-cut-off", "still-warming-up"],
)
def test_a_finished_run_goes_on_to_the_bits_of_one_that_had_the_length_from_the_start(
    tmp_path: pathlib.Path, short: dict[str, Any], long: dict[str, Any], settings: dict[str, Any]
) -> None:
    whole = make(tmp_path / "whole", **settings, **long)
    whole.train()
    first = make(tmp_path / "run", **settings, **short)
    first.train()
    first.save_model()
    longer = make(tmp_path / "run", **settings, **long)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step > first.state.global_step
    assert_same(longer, whole)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"lr_scheduler_type": "linear"},
            r"linear .*step 3 was taken with 0\.0003333 .*0\.0006667",
        ),
        ({"lr_scheduler_type": "cosine"}, "cosine"),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5}, "warmup"),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, r"every 2 step\(s\).*every 3"),
        ({**EVERY_TWO, "metric_for_best_model": "loss"}, "because the run ended there"),
    ],
    ids=["linear", "cosine", "share-of-warmup", "share-of-evaluations", "best-step"],
)
def test_a_length_that_would_have_changed_steps_already_taken_is_refused(
    tmp_path: pathlib.Path, settings: dict[str, Any], words: str
) -> None:
    make(tmp_path, max_steps=3, **settings).train()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("checkpoint-*/*")}
    with pytest.raises(ConfigError, match=r"max_steps: 3 -> 6: .*" + words) as refused:
        make(tmp_path, max_steps=6, **settings).train(resume_from_checkpoint=True)
    assert "lohan export" in refused.value.remedy
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    again = make(tmp_path, max_steps=3, **settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_steps_that_were_taken_are_not_taken_back(tmp_path: pathlib.Path) -> None:
    make(tmp_path, max_steps=3).train()
    with pytest.raises(ConfigError, match="would end after step 2"):
        make(tmp_path, max_steps=2).train(resume_from_checkpoint=True)


def test_a_schedule_of_ones_own_is_refused(tmp_path: pathlib.Path) -> None:
    class Falling(SFTTrainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(
                optimizer or self.optimizer, total_iters=num_training_steps
            )
            return self.lr_scheduler

    def falling(steps: int) -> SFTTrainer:
        made = make(tmp_path, max_steps=steps)
        made.__class__ = Falling
        return made

    falling(2).train()
    with pytest.raises(ConfigError, match="LinearLR"):
        falling(4).train(resume_from_checkpoint=True)


def test_a_stop_within_an_epoch_is_not_evaluated_and_goes_on_to_the_same_bits(
    tmp_path: pathlib.Path,
) -> None:
    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.stop_request.signal_number = 15

    settings = {**EVERY_EPOCH, "save_strategy": "epoch", "num_train_epochs": 2}
    whole = make(tmp_path / "whole", **settings)
    whole.train()
    trainer = make(tmp_path / "run", Stop(), **settings)
    with pytest.raises(SystemExit):
        trainer.train()
    assert not [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    resumed = make(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed, whole)


def test_seals_are_made_as_often_as_the_resumed_run_asks(tmp_path: pathlib.Path) -> None:
    sealed = []

    class Saved(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sealed.append(state.global_step)

    make(tmp_path, max_steps=2).train()
    make(tmp_path, Saved(), max_steps=6, save_steps=3).train(resume_from_checkpoint=True)
    assert sealed == [3, 6]
