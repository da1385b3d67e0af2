"""What scripts for TRL are made of in tests: arguments, tables, and the optimizer that judges."""

import pathlib
from typing import Any

import datasets
from trl import SFTConfig

from support import tiny_chat
from support.plain_engine import MasterAdamW


def sft_arguments(out: pathlib.Path, **changes: Any) -> SFTConfig:
    """Arguments of a short, quiet run that evaluates and does not clip."""
    given: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return SFTConfig(output_dir=str(out), **{**given, **changes})


def chat_tables(rows: list[dict[str, Any]], *, num_to_evaluate: int) -> dict[str, Any]:
    """Rows to train and to evaluate on, and the tokenizer, by the names trainers use."""
    return {
        "train_dataset": datasets.Dataset.from_list(rows),
        "eval_dataset": datasets.Dataset.from_list(rows[:num_to_evaluate]),
        "processing_class": tiny_chat.tokenizer(),
    }


def master_optimizer(trainer: Any) -> MasterAdamW:
    """AdamW with fp32 masters over transformers' two groups, for a trainer in memory."""
    args = trainer.args
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    named = list(trainer.model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    return MasterAdamW(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )
