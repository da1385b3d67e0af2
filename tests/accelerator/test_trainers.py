"""Adapters and preferences on the test accelerator, against TRL's own loop on it; ranks on it."""

import pathlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
import trl
from accelerate.utils import convert_outputs_to_fp32

import lohan
from support import accelerator, tiny_chat, trl_runs
from support.fork_server import run_forked
from support.preference_runs import arguments, in_memory, pairs, table
from support.rank_runs import RankRun, as_word, results_of
from support.trainer_engines import attach_small

DEVICE = f"{accelerator.NAME}:0"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _small_and_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", DEVICE)
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    # transformers knows by name which devices can do bf16.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def assert_same_training(ours: Any, plain: Any) -> None:
    losses = [
        [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        for one in (ours, plain)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    trained = dict(ours.engine.weights())
    for name, parameter in plain.model.named_parameters():
        assert parameter.device == torch.device(DEVICE)
        assert torch.equal(trained[name].to(parameter.dtype), parameter.cpu()), name


def test_an_adapter_has_the_losses_and_weights_of_trl(tmp_path: pathlib.Path) -> None:
    tables = trl_runs.chat_tables(tiny_chat.conversations(12), num_to_evaluate=3)
    short = {"gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-2}
    given = {**short, "use_cpu": False, "gradient_checkpointing": False, "eval_strategy": "no"}

    def kind() -> peft.PeftConfig:
        return peft.LoraConfig(
            r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules="all-linear"
        )

    ours = lohan.SFTTrainer(
        tiny_chat.model(tie_word_embeddings=False),
        trl_runs.sft_arguments(tmp_path / "ours", **given),
        peft_config=kind(),
        offload={"ssd": str(tmp_path / "ssd"), "device": DEVICE},
        **tables,
    )
    ours.train()
    plain = trl.SFTTrainer(
        tiny_chat.model(tie_word_embeddings=False),
        trl_runs.sft_arguments(tmp_path / "plain", bf16=False, **given),
        peft_config=kind(),
        **tables,
    )
    for parameter in plain.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    plain.model.forward = convert_outputs_to_fp32(plain.model.forward)
    plain.optimizer = trl_runs.master_optimizer(plain)
    plain.train()
    assert_same_training(ours, plain)
    ours.close()


def test_preferences_have_the_losses_and_weights_of_trl(tmp_path: pathlib.Path) -> None:
    given = {
        "use_cpu": False,
        "precompute_ref_log_probs": True,
        "max_steps": 3,
        "eval_strategy": "no",
    }
    rows = table(pairs(12))
    ours = lohan.DPOTrainer(
        tiny_chat.model(),
        args=arguments(trl.DPOConfig, tmp_path / "ours", **given),
        processing_class=tiny_chat.tokenizer(),
        offload={"ssd": str(tmp_path / "ssd"), "device": DEVICE},
        train_dataset=rows,
    )
    ours.train()
    args = arguments(trl.DPOConfig, tmp_path / "plain", **{**given, "bf16": False})
    plain = in_memory(trl.DPOTrainer, tiny_chat.model(), args, train_dataset=rows)
    plain.train()
    assert_same_training(ours, plain)
    ours.close()


def test_ranks_give_the_bits_of_one_process(tmp_path: pathlib.Path) -> None:
    """What they send each other goes through main memory: gloo takes no memory of a device."""
    run = RankRun(
        groups=2,
        max_grad_norm=1.0,
        dropout=0.1,
        counts=[3, 1],
        residents=False,
        device=accelerator.NAME,
    )
    words = [as_word(run), as_word(replace(run, num_ranks=2))]
    done = run_forked("support.rank_runs", [str(tmp_path), *words])
    alone, two = results_of(done.stdout, 2)
    for found in two:
        assert "error" not in found, found
        for name in ("losses", "norms", "masters", "m", "v"):
            assert found[name] == alone[0][name], name
