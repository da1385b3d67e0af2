"""The trainers against transformers' and TRL's own, in memory, with fp32 masters."""

import fcntl
import os
import pathlib
import signal
from typing import Any

import datasets
import pytest
import torch
import transformers
import trl

from lohan.errors import ConfigError
from lohan.train.trainer import trainer as trainers
from lohan.train.trainer.trainer import LohanWarning, SFTTrainer, Trainer
from support import tiny_chat, trl_runs
from support.plain_engine import attach_plainly


@pytest.fixture(autouse=True)
def _plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_plainly)


ROWS = tiny_chat.conversations(22)


def sft_arguments(out: pathlib.Path, **changes: Any) -> Any:
    given = {"gradient_accumulation_steps": 4, "assistant_only_loss": True, **changes}
    return trl_runs.sft_arguments(out, **given)


def tables() -> dict[str, Any]:
    return trl_runs.chat_tables(ROWS, num_to_evaluate=7)


def logged(trainer: Any, *names: str) -> list[Any]:
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


PLAIN = {"bf16": False, "gradient_checkpointing": False}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"assistant_only_loss": False, "packing": True, "packing_strategy": "wrapped"},
        pytest.param({"loss_type": "dft"}, marks=pytest.mark.slow),
        pytest.param(
            {"logging_steps": 3, "gradient_accumulation_steps": 3}, marks=pytest.mark.slow
        ),
    ],
    ids=["chat", "packing", "dft", "windows of three"],
)
def test_losses_and_weights_are_those_of_trl_with_fp32_masters(
    tmp_path: pathlib.Path, changes: dict[str, Any]
) -> None:
    ours = SFTTrainer(
        tiny_chat.model(),
        sft_arguments(tmp_path / "ours", **changes),
        **tables(),
        offload={"ssd": str(tmp_path)},
    )
    ours.train()
    plain = trl.SFTTrainer(
        tiny_chat.model(), sft_arguments(tmp_path / "plain", **PLAIN, **changes), **tables()
    )
    plain.optimizer = trl_runs.master_optimizer(plain)
    plain.train()
    for name in ("loss", "eval_loss", "learning_rate", "mean_token_accuracy", "num_tokens"):
        assert logged(ours, name) == logged(plain, name)
    assert len(logged(ours, "loss")) >= 1
    for (name, mine), other in zip(
        ours.model.named_parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.equal(mine, other), name


def test_the_plain_trainer_with_a_custom_loss_gives_the_losses_of_transformers(
    tmp_path: pathlib.Path,
) -> None:
    tokenizer = tiny_chat.tokenizer()
    table = datasets.Dataset.from_list(
        [
            dict(tokenizer(" ".join(["red sea"] * n), return_token_type_ids=False))
            for n in range(2, 15)
        ]
    ).map(lambda row: {"labels": row["input_ids"]})

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs.logits[:, :-1].float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(
            logits, labels[:, 1:].flatten(), reduction="sum"
        ) / (2 * num_items_in_batch)

    def arguments(folder: str, **changes: Any) -> Any:
        return transformers.TrainingArguments(
            output_dir=str(tmp_path / folder),
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            num_train_epochs=2,
            learning_rate=1e-3,
            weight_decay=0.1,
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **changes,
        )

    shared: dict[str, Any] = {
        "train_dataset": table,
        "data_collator": transformers.DataCollatorForSeq2Seq(tokenizer),
    }
    for loss in (loss_of, None):
        ours = Trainer(
            tiny_chat.model(),
            arguments("ours", bf16=True),
            compute_loss_func=loss,
            **shared,
            offload={"ssd": str(tmp_path)},
        )
        ours.train()
        plain = transformers.Trainer(
            tiny_chat.model(), arguments("plain"), compute_loss_func=loss, **shared
        )
        plain.optimizer = trl_runs.master_optimizer(plain)
        plain.train()
        assert logged(ours, "loss") == logged(plain, "loss")
        assert len(logged(ours, "loss")) == 6
        (tmp_path / "ours" / "_lohan" / "run.json").unlink()


def test_the_logged_gradient_norm_and_the_clipping_are_the_engines(tmp_path: pathlib.Path) -> None:
    ours = SFTTrainer(
        tiny_chat.model(),
        sft_arguments(tmp_path / "o", max_grad_norm=0.5, max_steps=2),
        **tables(),
        offload={"ssd": str(tmp_path)},
    )
    ours.train()
    assert ours.engine.optimizer.max_grad_norm == 0.5
    assert logged(ours, "grad_norm")[-1] == ours.last_step.grad_norm


def test_fp32_weights_become_exact_masters_and_bf16_compute_weights(tmp_path: pathlib.Path) -> None:
    model = tiny_chat.model(dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours = SFTTrainer(
        model, sft_arguments(tmp_path / "o"), **tables(), offload={"ssd": str(tmp_path)}
    )
    for name, master in ours.engine.weights():
        assert torch.equal(master, before[name]), name
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_model_given_by_name_is_streamed_and_never_loaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_chat.save_model(tmp_path / "m")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("from_pretrained was called")

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    ours = SFTTrainer(
        str(tmp_path / "m"),
        sft_arguments(tmp_path / "o", max_steps=1),
        **tables(),
        offload={"ssd": str(tmp_path)},
    )
    assert {p.device.type for p in ours.model.parameters()} == {"meta"}
    ours.train()
    assert logged(ours, "loss")


def test_the_exported_model_loads_with_the_trained_weights(tmp_path: pathlib.Path) -> None:
    tiny_chat.save_model(tmp_path / "m")
    ours = SFTTrainer(
        str(tmp_path / "m"),
        sft_arguments(tmp_path / "o", max_steps=2),
        **tables(),
        offload={"ssd": str(tmp_path)},
    )
    ours.train()
    ours.save_model()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "o", dtype="auto")
    trained = dict(ours.engine.weights())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[name].to(torch.bfloat16)), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "o")
    assert tokenizer.chat_template == tiny_chat.CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fsdp": "full_shard"}, "fsdp"),
        ({"torch_compile": True}, "torch_compile"),
        ({"optim": "adafactor"}, "adafactor"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"optim_args": "a=1"}, "optim_args"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_their_reason(
    tmp_path: pathlib.Path, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        SFTTrainer(
            tiny_chat.model(),
            sft_arguments(tmp_path / "o", **changes),
            **tables(),
            offload={"ssd": str(tmp_path)},
        )


@pytest.mark.parametrize(
    "name",
    [
        *("auto_find_batch_size", "save_only_model", "bf16_full_eval", "fp16_full_eval"),
        *("enable_jit_checkpoint", "activation_offloading"),
    ],
)
def test_switches_without_effect_are_told_and_switched_off(
    tmp_path: pathlib.Path, name: str
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.warns(LohanWarning, match=f"without effect: {name}: "):
            trainer = SFTTrainer(
                tiny_chat.model(),
                sft_arguments(tmp_path / "o", max_steps=1, eval_strategy="no", **{name: True}),
                **tables(),
                offload={"ssd": str(tmp_path)},
            )
        assert not getattr(trainer.args, name) or name == "enable_jit_checkpoint"
        if name == "enable_jit_checkpoint":
            trainer.train()
            # transformers' callback has put back what it found, not what it put there itself.
            assert signal.getsignal(signal.SIGTERM) is handler
        trainer.close()
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("name", ["quantization_config", "optimizer_cls_and_kwargs"])
def test_parameters_that_cannot_work_are_refused(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        SFTTrainer(
            tiny_chat.model(),
            sft_arguments(tmp_path / "o"),
            **tables(),
            offload={"ssd": str(tmp_path)},
            **{name: object()},
        )


def test_a_model_of_which_nothing_is_trained_is_refused(tmp_path: pathlib.Path) -> None:
    trainer = SFTTrainer(
        tiny_chat.model().requires_grad_(False),
        sft_arguments(tmp_path / "o"),
        **tables(),
        offload={"ssd": str(tmp_path)},
    )
    with pytest.raises(ConfigError, match="is_trainable=True"):
        trainer.train()


def test_a_setting_the_planner_decides_is_a_warning(tmp_path: pathlib.Path) -> None:
    with pytest.warns(LohanWarning, match="activation_offloading"):
        SFTTrainer(
            tiny_chat.model(),
            sft_arguments(tmp_path / "o", activation_offloading=True),
            **tables(),
            offload={"ssd": str(tmp_path)},
        )


def test_compute_in_fp32_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="bf16=True"):
        SFTTrainer(
            tiny_chat.model(dtype=torch.float32),
            sft_arguments(tmp_path / "o", bf16=False),
            **tables(),
            offload={"ssd": str(tmp_path)},
        )


def test_a_release_of_transformers_without_a_method_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "_RELIED_ON", ("method_of_tomorrow",))
    with pytest.raises(ConfigError, match="method_of_tomorrow"):
        SFTTrainer(tiny_chat.model(), sft_arguments(tmp_path / "o"), offload={"ssd": "x"})


def test_every_method_relied_on_is_in_this_release() -> None:
    assert all(hasattr(transformers.Trainer, name) for name in trainers._RELIED_ON)


def test_without_an_ssd_directory_nothing_is_made() -> None:
    with pytest.raises(ConfigError, match="--ssd"):
        SFTTrainer(tiny_chat.model())


def test_a_folder_another_process_trains_into_is_refused_before_states_are_written(
    tmp_path: pathlib.Path,
) -> None:
    trainer = SFTTrainer(
        tiny_chat.model(),
        sft_arguments(tmp_path / "out", max_steps=1),
        **tables(),
        offload={"ssd": str(tmp_path / "ssd")},
    )
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="another process is training into"):
            trainer.train()
    finally:
        os.close(descriptor)
    assert not (tmp_path / "out" / "_lohan" / "run.json").exists()
    trainer.train()
    trainer.close()
