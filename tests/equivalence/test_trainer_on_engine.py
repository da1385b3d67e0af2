"""The trainers on the engine, states on disk, against the same runs in memory."""

import pathlib
from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from transformers import TrainerCallback
from trl import SFTConfig

from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat
from support.plain_engine import attach_plainly
from support.trainer_engines import attach_small

ROWS = tiny_chat.conversations(14)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Killed(Exception):
    """A process that ends at once."""


class KillAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def make(
    folder: pathlib.Path, attach: Any, *callbacks: TrainerCallback, **changes: Any
) -> SFTTrainer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lohan.train.trainer.saving.attach_with", attach)
        shape = changes.pop("shape", {})
        dropout = changes.pop("dropout", 0.0)
        tiny_chat.save_model(folder / "model", attention_dropout=dropout, **shape)
        offload = {"ssd": [str(folder / "a"), str(folder / "b")], **changes.pop("offload", {})}
        settings: dict[str, Any] = {
            "use_cpu": True,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "per_device_eval_batch_size": 2,
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "pad_to_multiple_of": 16,
        }
        trainer = SFTTrainer(
            str(folder / "model"),
            SFTConfig(output_dir=str(folder / "out"), **{**settings, **changes}),
            train_dataset=datasets.Dataset.from_list(ROWS),
            eval_dataset=datasets.Dataset.from_list(ROWS[:5]),
            processing_class=tiny_chat.tokenizer(),
            callbacks=list(callbacks),
            offload=offload,
        )
        trainer.attach_for_test = attach
        trainer.model.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        trainer.model.register_forward_pre_hook(count_forward)
    return trainer


def count_forward(model: torch.nn.Module, _: Any) -> None:
    model.num_seen += model.training


def train(trainer: SFTTrainer, resume: Any = None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lohan.train.trainer.saving.attach_with", trainer.attach_for_test)
        trainer.train(resume_from_checkpoint=resume)


def states(trainer: SFTTrainer) -> dict[str, torch.Tensor]:
    found = {f"p.{name}": tensor.clone() for name, tensor in trainer.engine.weights()}
    for name, mean, square in trainer.engine.moments():
        found |= {f"m.{name}": mean.clone(), f"v.{name}": square.clone()}
    found["num_seen"] = trainer.model.num_seen.clone()
    assert found["num_seen"]
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def logged(trainer: SFTTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


SMALL = {"ram": 7 << 20, "gpu": 4 << 20}
LARGER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 20}


@pytest.mark.parametrize(
    "offload", [{}, pytest.param(SMALL, marks=pytest.mark.slow)], ids=["in RAM", "on SSD"]
)
def test_a_run_on_the_engine_is_the_run_in_memory_to_the_bit(
    tmp_path: pathlib.Path, offload: dict[str, Any]
) -> None:
    shape = LARGER if offload else {}
    ours = make(tmp_path / "ours", attach_small, offload=offload, shape=shape)
    plain = make(tmp_path / "plain", attach_plainly, shape=shape)
    for trainer in (ours, plain):
        train(trainer)
    metrics = ("entropy", "mean_token_accuracy", "eval_entropy", "eval_mean_token_accuracy")
    for name in ("loss", "eval_loss", "learning_rate", "num_tokens", *metrics):
        assert logged(ours, name) == logged(plain, name), name
    # fp64 sums of squares in another order; as fp32 factors for the gradients they are equal.
    assert logged(ours, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-13)
    assert_same(states(ours), states(plain))
    # Of a single step, bytes may count in the one after it: the drives are behind.
    assert (ours.engine.prediction.written_bytes > 0) == bool(offload)
    ours.save_model()
    assert (ours.out / "_lohan" / "plan.json").exists()
    ours.close()


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_killed_run_on_the_engine_continues_to_the_same_bits(
    tmp_path: pathlib.Path, step: int
) -> None:
    whole = make(tmp_path / "whole", attach_small, dropout=0.2)
    train(whole)
    expected = states(whole)
    whole.close()
    killed = make(tmp_path / "run", attach_small, KillAfter(step), dropout=0.2)
    with pytest.raises(Killed):
        train(killed)
    killed.close()
    resumed = make(tmp_path / "run", attach_small, dropout=0.2)
    train(resumed, resume=True)
    assert_same(states(resumed), expected)
    assert logged(resumed, "loss") == logged(whole, "loss")
    resumed.close()


@pytest.mark.slow
def test_an_archive_on_another_machine_continues_to_the_same_bits(tmp_path: pathlib.Path) -> None:
    whole = make(tmp_path / "whole", attach_small)
    train(whole)
    expected = states(whole)
    whole.close()
    killed = make(tmp_path / "a", attach_small, KillAfter(3), offload={"archive_steps": 2})
    with pytest.raises(Killed):
        train(killed)
    killed.close()
    moved = tmp_path / "moved"
    (tmp_path / "a" / "out" / "checkpoint-2").rename(moved)
    resumed = make(tmp_path / "b", attach_small)
    train(resumed, resume=str(moved))
    assert_same(states(resumed), expected)
    resumed.close()


def test_a_run_stopped_before_its_first_seal_begins_from_its_states(
    tmp_path: pathlib.Path,
) -> None:
    class KillAtOnce(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise Killed

    killed = make(tmp_path, attach_small, KillAtOnce(), max_steps=1)
    with pytest.raises(Killed):
        train(killed)
    killed.close()
    resumed = make(tmp_path, attach_small, max_steps=1)
    train(resumed, resume=True)
    assert resumed.state.global_step == 1
    resumed.close()
