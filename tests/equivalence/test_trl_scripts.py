"""Scripts written for TRL, with states on disk, against TRL itself in memory with fp32 masters."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import trl
from accelerate.utils import convert_outputs_to_fp32
from transformers import TrainerCallback

from lohan.errors import ConfigError
from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_chat, trl_runs
from support.trainer_engines import attach_small

ROWS = tiny_chat.conversations(14)
# Of the engine, and of the clock.
NOT_COMPARED = (
    "grad_norm",
    "prediction_error",
    "seconds",
    "bytes",
    "busy_",
    "runtime",
    "per_second",
    "time",
    "flos",
)
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")


@pytest.fixture(autouse=True)
def _small_and_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class LearningRateByHand(TrainerCallback):
    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 * (state.global_step + 1)


def half_the_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / (2 * (num_items_in_batch if num_items_in_batch is not None else 1))


def accuracy(found: Any) -> dict[str, float]:
    right = found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "rows": float(len(found.predictions))}


def settings(out: pathlib.Path, **changes: Any) -> Any:
    return trl_runs.sft_arguments(
        out, **{"gradient_accumulation_steps": 2, "warmup_steps": 2, **changes}
    )


def tables() -> dict[str, Any]:
    return trl_runs.chat_tables(ROWS, num_to_evaluate=5)


def offloaded(place: pathlib.Path, changes: dict[str, Any], **more: Any) -> SFTTrainer:
    return SFTTrainer(
        tiny_chat.model(),
        settings(place / "ours", **changes),
        offload={"ssd": str(place / "ssd")},
        **tables(),
        **more,
    )


def in_memory(place: pathlib.Path, changes: dict[str, Any], **more: Any) -> trl.SFTTrainer:
    plainly = {"bf16": False, "gradient_checkpointing": False, **changes}
    model = tiny_chat.model()
    # What `bf16=True` does to a model that needs no autocast.
    model.forward = convert_outputs_to_fp32(model.forward)
    made = trl.SFTTrainer(model, settings(place / "plain", **plainly), **tables(), **more)
    made.optimizer = trl_runs.master_optimizer(made)
    return made


def history(trainer: Any) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in entry.items() if not any(k in key for k in NOT_COMPARED)}
        for entry in trainer.state.log_history
    ]


def assert_same_training(ours: SFTTrainer, plain: Any) -> None:
    assert history(ours) == history(plain)
    assert len(history(ours)) > 3
    trained = dict(ours.engine.weights())
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(trained[name].to(parameter.dtype), parameter), name


SCRIPTS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "label smoothing": ({"label_smoothing_factor": 0.1}, dict),
    "a loss of one's own": ({}, lambda: {"compute_loss_func": half_the_loss}),
    "metrics from logits": ({"eval_on_start": True}, lambda: {"compute_metrics": accuracy}),
    "noise on the embeddings": ({"neftune_noise_alpha": 5.0}, dict),
    "rates set by a callback": ({}, lambda: {"callbacks": [LearningRateByHand()]}),
    "other betas and a floor": (
        {
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-6,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        },
        dict,
    ),
    "on a plateau": ({"lr_scheduler_type": "reduce_lr_on_plateau"}, dict),
    "rows by length": ({"train_sampling_strategy": "group_by_length"}, dict),
    "tokens counted": ({"include_num_input_tokens_seen": True, "dataloader_num_workers": 1}, dict),
}
QUICK = ("label smoothing", "a loss of one's own", "metrics from logits", "noise on the embeddings")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS],
)
def test_a_script_gives_the_losses_metrics_and_weights_of_trl(
    tmp_path: pathlib.Path, name: str
) -> None:
    changes, more = SCRIPTS[name]
    # One after the other: making a trainer sets the seed.
    ours = offloaded(tmp_path, changes, **more())
    ours.train()
    plain = in_memory(tmp_path, changes, **more())
    plain.train()
    assert_same_training(ours, plain)
    ours.close()


def test_evaluating_and_predicting_before_and_after_training_are_those_of_trl(
    tmp_path: pathlib.Path,
) -> None:
    ours = offloaded(tmp_path, {"eval_strategy": "no"})
    plain = in_memory(tmp_path, {"eval_strategy": "no"})
    found = []
    for trainer in (ours, plain):
        before = trainer.evaluate()["eval_loss"]
        first = trainer.predict(trainer.eval_dataset)
        trainer.train()
        found.append((before, first, trainer.predict(trainer.eval_dataset)))
    assert_same_training(ours, plain)
    (our_loss, *our_predictions), (loss, *predictions) = found
    assert our_loss == loss
    for one, other in zip(our_predictions, predictions, strict=True):
        assert np.array_equal(one.predictions, other.predictions)
        assert np.array_equal(one.label_ids, other.label_ids)
        assert one.metrics["test_loss"] == other.metrics["test_loss"]
    ours.close()


def test_dropout_under_a_loss_that_trl_runs_twice_is_refused_before_anything_is_written(
    tmp_path: pathlib.Path,
) -> None:
    ours = SFTTrainer(
        tiny_chat.model(attention_dropout=0.1),
        settings(tmp_path / "ours", label_smoothing_factor=0.1),
        offload={"ssd": str(tmp_path / "ssd")},
        **tables(),
    )
    with pytest.raises(ConfigError, match=r"label_smoothing_factor .*attention_dropout"):
        ours.train()
    assert not (tmp_path / "ssd").exists()
