"""Trainers that are used again, stopped by errors, or given what scripts for memory give them."""

import os
import pathlib
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
import trl

import lohan
from lohan.errors import CheckpointError, ConfigError, LohanWarning
from support import tiny_chat, trl_runs
from support.plain_engine import MasterAdamW
from support.trainer_engines import attach_small


@pytest.fixture(autouse=True)
def _small_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)


def rows(num_rows: int = 8) -> datasets.Dataset:
    draw = np.random.default_rng(0)
    made = [draw.integers(5, 300, size=6 + number % 4).tolist() for number in range(num_rows)]
    return datasets.Dataset.from_list([{"input_ids": one, "labels": one} for one in made])


def settings(out: pathlib.Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "log_level": "error",
    }
    return transformers.TrainingArguments(output_dir=str(out), **{**given, **changes})


def ours(place: pathlib.Path, kind: Any = lohan.Trainer, **changes: Any) -> Any:
    names = ("callbacks", "optimizers", "data_collator")
    more = {name: changes.pop(name) for name in names if name in changes}
    model = changes.pop("model", None) or tiny_chat.model()
    given = {"data_collator": transformers.DataCollatorForSeq2Seq(tiny_chat.tokenizer()), **more}
    return kind(
        model,
        settings(place / "out", bf16=True, **changes),
        train_dataset=rows(),
        offload={"ssd": str(place / "ssd")},
        **given,
    )


def in_memory(place: pathlib.Path, **changes: Any) -> Any:
    made = transformers.Trainer(
        tiny_chat.model(),
        settings(place / "plain", save_strategy="no", **changes),
        train_dataset=rows(),
        data_collator=transformers.DataCollatorForSeq2Seq(tiny_chat.tokenizer()),
    )
    made.optimizer = trl_runs.master_optimizer(made)
    return made


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_weights(trainer: Any, plain: Any) -> None:
    trained = dict(trainer.engine.weights())
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(trained[name].to(parameter.dtype), parameter), name


class FailAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("of a callback")


def test_a_trainer_trains_twice_as_in_memory_and_is_resumed_from_there(
    tmp_path: pathlib.Path,
) -> None:
    plain = in_memory(tmp_path)
    plain.train()
    plain.train()
    trainer = ours(tmp_path)
    trainer.train()
    failing = FailAt(2)
    trainer.add_callback(failing)
    with pytest.raises(RuntimeError, match="of a callback"):
        trainer.train()
    assert trainer.sealed_step == 1
    assert trainer.engine.num_steps == 4
    failing.step = 0
    trainer.train(resume_from_checkpoint=True)  # the same trainer, which still holds its run
    assert losses(trainer) == losses(plain)
    assert_same_weights(trainer, plain)
    trainer.close()


def test_a_run_goes_on_in_another_trainer_of_the_same_process(tmp_path: pathlib.Path) -> None:
    failed = ours(tmp_path, callbacks=[FailAt(1)])
    with pytest.raises(RuntimeError, match="of a callback"):
        failed.train()
    trainer = ours(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2
    trainer.close()


def test_a_folder_of_another_tool_is_refused_before_anything_is_written(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-7").mkdir()  # the run has no such step
    with pytest.raises(CheckpointError, match=r"checkpoint-2 is there and was not written by"):
        ours(tmp_path).train()
    assert not (tmp_path / "ssd").exists()
    (tmp_path / "out" / "checkpoint-2").rmdir()
    trainer = ours(tmp_path)
    trainer.train()
    trainer.close()


def test_a_second_run_takes_the_folder_of_one_that_ended(tmp_path: pathlib.Path) -> None:
    first = ours(tmp_path)
    first.train()
    first.save_model()
    second = ours(tmp_path, callbacks=[FailAt(1)])
    with (
        pytest.warns(LohanWarning, match=f"run {first.engine.run_id} .* has ended"),
        pytest.raises(RuntimeError, match="of a callback"),
    ):
        second.train()
    assert (tmp_path / "out" / f"_lohan-{first.engine.run_id}" / "log.jsonl").exists()
    for work in (lambda trainer: trainer.train(), lambda trainer: trainer.evaluate(rows())):
        with pytest.raises(CheckpointError, match=r"not ended.*resume_from_checkpoint=True"):
            work(ours(tmp_path))


def test_rows_without_labels_are_predicted_as_in_memory(tmp_path: pathlib.Path) -> None:
    asked = rows(6).remove_columns("labels")
    trainer = ours(tmp_path)
    found = trainer.predict(asked)
    expected = in_memory(tmp_path).predict(asked)
    assert np.array_equal(found.predictions, expected.predictions)
    assert "test_loss" not in found.metrics
    trainer.close()


class TwoForwards(lohan.Trainer):
    def compute_loss(self, model: Any, inputs: Any, *more: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss + model(**inputs).loss


def test_two_forwards_in_a_loss_are_refused_in_words(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"called the model again.*into one batch"):
        ours(tmp_path, TwoForwards).train()


def groups_by_layer(model: Any) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    low = [p for name, p in named.items() if "layers.0" in name]
    high = [p for name, p in named.items() if "layers.0" not in name]
    return [
        {"params": low, "lr": 1e-4, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-7},
        {"params": high, "lr": 2e-3, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8},
    ]


class ByLayer(lohan.Trainer):
    def parameter_groups(self) -> list[dict[str, Any]]:
        return groups_by_layer(self.model)


@pytest.mark.parametrize("is_given", [True, False])
def test_rates_by_layer_are_those_of_adamw_in_memory(
    tmp_path: pathlib.Path, is_given: bool
) -> None:
    plain = in_memory(tmp_path)
    plain.optimizer = MasterAdamW(
        groups_by_layer(plain.model), lr=1e-3, betas=(0.9, 0.999), eps=1e-8
    )
    plain.train()
    model = tiny_chat.model()
    more: dict[str, Any] = {"model": model}
    if is_given:
        more["optimizers"] = (torch.optim.AdamW(groups_by_layer(model)), None)
    trainer = ours(tmp_path, lohan.Trainer if is_given else ByLayer, **more)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert_same_weights(trainer, plain)
    trainer.close()


def test_other_optimizers_and_schedules_are_refused(tmp_path: pathlib.Path) -> None:
    model = tiny_chat.model()
    plain = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(plain)
    for given, said in (
        ((torch.optim.SGD(model.parameters()), None), "torch.optim.sgd.SGD"),
        ((torch.optim.AdamW(model.parameters(), amsgrad=True), None), "AdamW with amsgrad"),
        ((plain, schedule), "lr_scheduler_type"),
    ):
        with pytest.raises(ConfigError, match=said):
            ours(tmp_path, model=model, optimizers=given)


def test_other_workers_and_evaluation_batches_go_on(tmp_path: pathlib.Path) -> None:
    whole = ours(tmp_path / "whole")
    whole.train()
    failed = ours(tmp_path, callbacks=[FailAt(1)], per_device_eval_batch_size=2)
    with pytest.raises(RuntimeError, match="of a callback"):
        failed.train()
    failed.close()
    changed = {"per_device_eval_batch_size": 3, "dataloader_num_workers": 1}
    # A collator of one's own may draw, and each worker draws for itself.
    own = ours(tmp_path, data_collator=lambda found: found, **changed)
    with pytest.raises(ConfigError, match="dataloader_num_workers: 0 -> 1"):
        own.train(resume_from_checkpoint=True)
    trainer = ours(tmp_path, **changed)
    trainer.train(resume_from_checkpoint=True)
    trained = dict(trainer.engine.weights())
    for name, value in whole.engine.weights():
        assert torch.equal(trained[name], value), name
    for one in (whole, trainer):
        one.close()


def test_the_model_saves_itself_and_answers_from_where_its_weights_are(
    tmp_path: pathlib.Path,
) -> None:
    tiny_chat.save_model(tmp_path / "model")
    args = trl_runs.sft_arguments(
        tmp_path / "out",
        max_steps=1,
        eval_strategy="no",
        model_init_kwargs={"dtype": "float32", "use_cache": False, "low_cpu_mem_usage": True},
    )
    with pytest.warns(LohanWarning, match=r"without effect: model_init_kwargs.dtype"):
        trainer = lohan.SFTTrainer(
            os.fspath(tmp_path / "model"),
            args,
            train_dataset=datasets.Dataset.from_list(tiny_chat.conversations(4)),
            processing_class=tiny_chat.tokenizer(),
            offload={"ssd": str(tmp_path / "ssd")},
        )
    assert trainer.model.config.use_cache is False
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    trained = dict(trainer.engine.weights())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[name].to(torch.bfloat16)), name
    assert len(trainer.answers(["red sky", "one"])) == 2
    trainer.close()


def test_keywords_of_a_model_that_cannot_be_honoured_are_refused(tmp_path: pathlib.Path) -> None:
    tiny_chat.save_model(tmp_path / "model")
    args = trl.SFTConfig(
        str(tmp_path / "out"), model_init_kwargs={"subfolder": "x"}, use_cpu=True, report_to="none"
    )
    with pytest.raises(ConfigError, match="model_init_kwargs has subfolder"):
        lohan.SFTTrainer(str(tmp_path / "model"), args, offload={"ssd": str(tmp_path)})
