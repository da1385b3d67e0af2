"""Tiny models with every kind of loss that transformers has, and rows for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from support import tiny_models

VOCABULARY, LENGTH, NUM_CLASSES = tiny_models.VOCABULARY, 9, 3
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert(kind: str, **settings: Any) -> torch.nn.Module:
    config = transformers.BertConfig(**SMALL, **{"num_labels": NUM_CLASSES, **settings})
    return getattr(transformers, f"BertFor{kind}")(config)


def roberta() -> torch.nn.Module:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL))


def xlnet() -> torch.nn.Module:
    config = transformers.XLNetConfig(
        vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=24, dropout=0.0
    )
    return transformers.XLNetLMHeadModel(config)


def tokens(draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(4, VOCABULARY, (LENGTH,), generator=draw)}


def of_language(draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Some labels do not count, the first one among them now and then."""
    row = tokens(draw)
    is_counted = torch.rand(LENGTH, generator=draw) < 0.6
    is_counted[4] = True
    return {**row, "labels": row["input_ids"].masked_fill(~is_counted, -100)}


def of_both_sides(draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Where labels are smoothed the model does not see them."""
    row = of_language(draw)
    return {**row, "decoder_input_ids": row["input_ids"].roll(1)}


def of_tokens(draw: torch.Generator) -> dict[str, torch.Tensor]:
    row = of_language(draw)
    return {**row, "labels": (row["labels"] % NUM_CLASSES).where(row["labels"] >= 0, -100)}


def of_sequences(draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {**tokens(draw), "labels": torch.randint(0, NUM_CLASSES, (), generator=draw)}


def of_numbers(draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {**tokens(draw), "labels": torch.randn((), generator=draw)}


def of_many_labels(draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {**tokens(draw), "labels": torch.randint(0, 2, (NUM_CLASSES,), generator=draw).float()}


def of_answers(draw: torch.Generator) -> dict[str, torch.Tensor]:
    first, last = torch.randint(0, LENGTH, (2,), generator=draw)
    return {**tokens(draw), "start_positions": first, "end_positions": last}


@dataclass(frozen=True, kw_only=True)
class Family:
    build: Callable[[], torch.nn.Module]
    row: Callable[[torch.Generator], dict[str, torch.Tensor]]
    settings: dict[str, Any] = field(default_factory=dict)


SMOOTHED = {"label_smoothing_factor": 0.1}
FAMILIES = {
    "llama": Family(build=lambda: tiny_models.llama(0.0), row=of_language),
    "llama, smoothed": Family(
        build=lambda: tiny_models.llama(0.0), row=of_language, settings=SMOOTHED
    ),
    "gpt2": Family(build=lambda: tiny_models.gpt2(0.0), row=of_language),
    "t5": Family(build=lambda: tiny_models.t5(0.0), row=of_language),
    "t5, smoothed": Family(build=lambda: tiny_models.t5(0.0), row=of_both_sides, settings=SMOOTHED),
    "bart, smoothed": Family(
        build=lambda: tiny_models.bart(0.0), row=of_both_sides, settings=SMOOTHED
    ),
    "bart": Family(build=lambda: tiny_models.bart(0.0), row=of_language),
    "masked": Family(build=lambda: bert("MaskedLM"), row=of_language),
    "masked, roberta": Family(build=roberta, row=of_language),
    "xlnet": Family(build=xlnet, row=of_language),
    "token classes": Family(build=lambda: bert("TokenClassification"), row=of_tokens),
    "classes": Family(build=lambda: bert("SequenceClassification"), row=of_sequences),
    "regression": Family(
        build=lambda: bert("SequenceClassification", num_labels=1), row=of_numbers
    ),
    "many labels": Family(
        build=lambda: bert("SequenceClassification", problem_type="multi_label_classification"),
        row=of_many_labels,
    ),
    "answers": Family(build=lambda: bert("QuestionAnswering", num_labels=2), row=of_answers),
}


def in_bf16(model: torch.nn.Module) -> torch.nn.Module:
    """All parameters: transformers leaves some of XLNet in fp32, and then cannot run it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model
