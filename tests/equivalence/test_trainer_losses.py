"""Losses of the trainer on the engine against transformers' own trainer in memory.

The judge computes with bf16 weights, keeps fp32 masters, and widens what its loss functions get by
replacing them: slow, and for one process only.
"""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
import torch
import transformers
from accelerate.utils import convert_outputs_to_fp32

import lohan
from support import trl_runs
from support.loss_families import FAMILIES, in_bf16
from support.trainer_engines import attach_small

LOSS_FUNCTIONS = ("cross_entropy", "mse_loss", "binary_cross_entropy_with_logits")


@pytest.fixture(autouse=True)
def _small_and_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def made(name: str, folder: pathlib.Path) -> tuple[torch.nn.Module, datasets.Dataset]:
    """A model in bf16 as `from_pretrained` gives it, and rows for it."""
    torch.manual_seed(0)
    model = FAMILIES[name].build()
    in_bf16(model).save_pretrained(folder)
    model = in_bf16(type(model).from_pretrained(folder, dtype=torch.bfloat16))
    draw = torch.Generator().manual_seed(1)
    rows = [FAMILIES[name].row(draw) for _ in range(14)]
    return model, datasets.Dataset.from_list(
        [{key: value.tolist() for key, value in row.items()} for row in rows]
    )


def arguments(out: pathlib.Path, name: str, **changes: Any) -> transformers.TrainingArguments:
    given: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "num_train_epochs": 1,
        "learning_rate": 3e-3,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **FAMILIES[name].settings,
    }
    return transformers.TrainingArguments(output_dir=str(out), **{**given, **changes})


def judged(place: pathlib.Path, name: str, **changes: Any) -> Any:
    """transformers' trainer in memory, with wide losses."""
    model, rows = made(name, place / "model")
    model.forward = convert_outputs_to_fp32(model.forward)
    with pytest.MonkeyPatch.context() as patch:
        for one in LOSS_FUNCTIONS:
            patch.setattr(torch.nn.functional, one, widened(getattr(torch.nn.functional, one)))
        trainer = transformers.Trainer(
            model,
            arguments(place / "plain", name, bf16=False, **changes),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
        )
        trainer.optimizer = trl_runs.master_optimizer(trainer)
        trainer.train()
    return trainer


def widened(function: Callable[..., Any]) -> Callable[..., Any]:
    def wide(source: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(source.float(), target, *args, **kwargs)

    return wide


def offloaded(place: pathlib.Path, name: str, *, is_by_name: bool = False, **changes: Any) -> Any:
    model, rows = made(name, place / "model")
    trainer = lohan.Trainer(
        str(place / "model") if is_by_name else model,
        arguments(place / "ours", name, bf16=True, **changes),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        offload={"ssd": str(place / "ssd")},
    )
    trainer.train()
    return trainer


def losses(trainer: Any) -> list[float]:
    return [
        entry[key]
        for entry in trainer.state.log_history
        for key in ("loss", "eval_loss")
        if key in entry
    ]


def assert_same(ours: Any, plain: Any) -> None:
    assert losses(ours) == losses(plain)
    trained = dict(ours.engine.weights())
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(trained[name].to(parameter.dtype), parameter), name
    ours.close()


# Two steps of three micro-batches and, at the end of the epoch, one of one.
NUM_MICRO_BATCHES = 3
QUICK = ("llama, smoothed", "t5", "masked", "classes")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_losses_are_those_of_transformers_trainer(tmp_path: pathlib.Path, name: str) -> None:
    changes = {"gradient_accumulation_steps": NUM_MICRO_BATCHES}
    assert_same(offloaded(tmp_path, name, **changes), judged(tmp_path, name, **changes))


def fewer() -> list[Any]:
    """One number for every family, in turn; the other of the two takes as long and is for later."""
    return [
        pytest.param(
            name, count, marks=pytest.mark.slow if count == 1 + turn % 2 else pytest.mark.long
        )
        for turn, name in enumerate(FAMILIES)
        for count in (1, 2)
    ]


@pytest.mark.parametrize(("name", "num_micro_batches"), fewer())
def test_losses_of_fewer_micro_batches(
    tmp_path: pathlib.Path, name: str, num_micro_batches: int
) -> None:
    changes = {"gradient_accumulation_steps": num_micro_batches}
    assert_same(offloaded(tmp_path, name, **changes), judged(tmp_path, name, **changes))


def test_a_model_given_by_name_is_the_module(tmp_path: pathlib.Path) -> None:
    # transformers knows no loss of GPT-2 by name, and counts labels otherwise than it shifts them.
    changes = {"gradient_accumulation_steps": NUM_MICRO_BATCHES}
    ours = offloaded(tmp_path, "gpt2", is_by_name=True, **changes)
    assert_same(ours, judged(tmp_path, "gpt2", **changes))
