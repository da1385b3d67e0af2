"""Vision-language models with states on disk, against TRL itself in memory with fp32 masters."""

import pathlib
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import transformers
import trl
from accelerate.utils import convert_outputs_to_fp32

from lohan.train.trainer.trainer import SFTTrainer
from support import tiny_vision, trl_runs
from support.trainer_engines import attach_small

# Steps of two batches: without pictures; with rows of both kinds; with a batch of each kind.
PICTURES = [0, 0, 0, 0, 1, 2, 0, 1, 1, 1, 0, 0]
# Qwen2-VL runs much as its successor does.
FAMILIES = [
    "qwen2_5_vl",
    pytest.param("qwen2_vl", marks=pytest.mark.long),
    pytest.param("llava", marks=pytest.mark.slow),
    pytest.param("gemma3", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def _small_and_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach_small)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def given(family: str, out: pathlib.Path, **changes: Any) -> dict[str, Any]:
    settings = {
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
        "per_device_eval_batch_size": 3,
        "max_length": None,
        **changes,
    }
    return {
        "args": trl_runs.sft_arguments(out, **settings),
        "train_dataset": tiny_vision.rows(PICTURES),
        "eval_dataset": tiny_vision.rows([1, 0, 1], seed=1),
        "processing_class": tiny_vision.processor(family),
    }


def ours(family: str, folder: pathlib.Path, model: Any = None, **changes: Any) -> SFTTrainer:
    return SFTTrainer(
        model or tiny_vision.model(family),
        offload={"ssd": str(folder / "ssd")},
        **given(family, folder / "ours", bf16=True, **changes),
    )


def losses(trainer: Any) -> list[float]:
    entries = trainer.state.log_history
    return [entry[key] for entry in entries for key in ("loss", "eval_loss") if key in entry]


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_trained_on_as_trl_does_it(tmp_path: pathlib.Path, family: str) -> None:
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = ours(family, tmp_path, **changes)
    whole.train()
    plain = trl.SFTTrainer(
        tiny_vision.model(family), **given(family, tmp_path / "plain", bf16=False)
    )
    plain.model.forward = convert_outputs_to_fp32(plain.model.forward)
    plain.optimizer = trl_runs.master_optimizer(plain)
    plain.train()
    assert losses(whole) == losses(plain)
    assert len(losses(whole)) == 5
    trained = dict(whole.engine.weights())
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(trained[name].to(parameter.dtype), parameter), name
    whole.save_model()
    whole.close()
    saved = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", dtype=torch.bfloat16
    )
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(saved.get_parameter(name), parameter), name
    if family in ("llava", "gemma3"):
        processor = transformers.AutoProcessor.from_pretrained(tmp_path / "ours")
        assert processor.chat_template == tiny_vision.processor(family).chat_template

    # The same by name, with its weights on disk.
    tiny_vision.model(family).save_pretrained(tmp_path / "model")
    changes["model"] = str(tmp_path / "model")
    stopped = ours(family, tmp_path / "again", **changes)
    stopped.add_callback(StopAfter(2))
    stopped.train()
    stopped.close()
    resumed = ours(family, tmp_path / "again", **changes)
    resumed.train(resume_from_checkpoint=True)
    again = dict(resumed.engine.weights())
    assert all(torch.equal(again[name], value) for name, value in trained.items())
    resumed.close()


@pytest.mark.slow
def test_an_adapter_is_trained_on_pictures_and_finds_the_processor_of_its_model(
    tmp_path: pathlib.Path,
) -> None:
    changes: dict[str, Any] = {"max_steps": 2}

    def lora() -> peft.LoraConfig:
        return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])

    tiny_vision.model("llava").save_pretrained(tmp_path / "model")
    tiny_vision.processor("llava").save_pretrained(tmp_path / "model")
    ours = SFTTrainer(
        str(tmp_path / "model"),
        offload={"ssd": str(tmp_path / "ssd")},
        peft_config=lora(),
        **{**given("llava", tmp_path / "ours", bf16=True, **changes), "processing_class": None},
    )
    ours.train()
    plain = trl.SFTTrainer(
        tiny_vision.model("llava"),
        peft_config=lora(),
        **given("llava", tmp_path / "plain", bf16=False, **changes),
    )
    for parameter in plain.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    plain.model.forward = convert_outputs_to_fp32(plain.model.forward)
    plain.optimizer = trl_runs.master_optimizer(plain)
    plain.train()
    assert losses(ours) == losses(plain)
    trained = dict(ours.engine.weights())
    for name, parameter in plain.model.named_parameters():
        assert torch.equal(trained[name].to(parameter.dtype), parameter), name
    ours.save_model()
    ours.close()
    assert (tmp_path / "ours" / "processor_config.json").exists()
    assert (tmp_path / "ours" / "adapter_model.safetensors").exists()


class StopAfter(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self._step
