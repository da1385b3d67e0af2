"""What scripts that train on preferences are made of in tests."""

import pathlib
import random
from typing import Any

import datasets
import torch
import transformers
import trl
from accelerate.utils import convert_outputs_to_fp32

from support import tiny_chat, trl_runs

_WORDS = tiny_chat.WORDS


def pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with an answer that is liked and one that is not."""
    draw = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, most)))

    return [
        {"prompt": words(9), "chosen": " " + words(12), "rejected": " " + words(7)}
        for _ in range(count)
    ]


def judged(count: int) -> list[dict[str, Any]]:
    """Prompts with one answer each, and whether it is liked."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 3 != 1}
        for number, row in enumerate(pairs(count, seed=1))
    ]


def table(rows: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def arguments(kind: Any, out: pathlib.Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "bf16": True,
    }
    return kind(output_dir=str(out), **{**given, **changes})


def reward_model() -> Any:
    torch.manual_seed(0)
    made = transformers.LlamaForSequenceClassification(tiny_chat.config(num_labels=1))
    for parameter in made.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return made


def in_memory(kind: Any, model: Any, args: Any, **more: Any) -> Any:
    """TRL's own trainer, with fp32 masters and outputs widened as `bf16=True` does it."""
    model.forward = convert_outputs_to_fp32(model.forward)
    made = kind(model, args=args, processing_class=tiny_chat.tokenizer(), **more)
    made.optimizer = trl_runs.master_optimizer(made)
    return made


def plain_kind(name: str) -> Any:
    if name in ("ORPO", "CPO"):
        from trl.experimental import cpo, orpo

        return {"ORPO": orpo, "CPO": cpo}[name]
    return trl
