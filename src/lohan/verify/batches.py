"""Random micro-batches for a small model, and the loss of models that have none of their own.

Owns which values an input may have. Shapes come from `lohan.model.inputs`. Called by `small_copy`.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lohan.engine.planning.label_watch import IGNORED_LABEL
from lohan.model.inputs import inputs_for

MakeBatch = Callable[[int], dict[str, Any]]

_NUM_ROWS = 2
_NUM_TOKENS = 12
_NUM_IMAGE_TOKENS = 16
"""Of images that come as tokens, and of their texts."""
_NUM_TIMES = 1000


def batches_for(model: nn.Module, dtype: torch.dtype) -> MakeBatch:
    """How to make micro-batches: equal seeds give equal batches.

    Raises:
        ConfigError: it is not known what the model's forward takes.
    """
    make_inputs, is_fixed = inputs_for(model, dtype)
    ranges = _ranges(model)
    accepted = inspect.signature(model.forward).parameters

    def make(seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1000 + seed)
        inputs = make_inputs(_NUM_ROWS, 0 if is_fixed else _NUM_TOKENS)
        made = {
            name: _filled(name, _cut(name, value), ranges, generator)
            for name, value in inputs.items()
        }
        if "hidden_states" in made:
            noise = torch.randn(made["hidden_states"].shape, generator=generator).to(dtype)
            return {"inputs": made, "noise": noise}
        if "input_ids" in made:
            _mask(made, 1 + 4 * (seed % 3), has_mask="attention_mask" in accepted)
        return made

    return make


def noise_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Mean squared error of a diffusion model's predicted noise.

    Some predict a variance in further channels; it is left out.
    """
    predicted = model(**batch["inputs"])[0]
    noise = batch["noise"]
    return functional.mse_loss(predicted[:, : noise.shape[1]].float(), noise.float())


def states_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """The model's own loss, and a share of every hidden state behind a block and of all router
    logits: what a model collects while it runs is then part of the gradient."""
    config: Any = model.config
    wanted = {"output_hidden_states": True}
    if hasattr(config, "output_router_logits"):
        wanted["output_router_logits"] = True
    output = model(**batch, **wanted)
    states = output.get("hidden_states") or output.get("decoder_hidden_states")
    # The first one is what the embedding gives, whose weights may be the head's too.
    read = [*states[1:], *(output.get("router_logits") or ())]
    shares = [one.float().square().mean() for one in read if isinstance(one, torch.Tensor)]
    loss: torch.Tensor = output["loss"] + torch.stack(shares).mean()
    return loss


def _ranges(model: nn.Module) -> dict[str, int]:
    """Values below which whole-number inputs lie."""
    config: Any = getattr(model, "config", None)
    settings = dict(config) if isinstance(config, Mapping) else {}
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    text = getattr(config, "get_text_config", lambda: config)()
    vocabulary = getattr(text, "vocab_size", None) or min(
        (table.num_embeddings for table in tables), default=2
    )
    is_classifier = type(model).__name__.endswith("Classification")
    return {
        "input_ids": vocabulary,
        "decoder_input_ids": vocabulary,
        "labels": getattr(config, "num_labels", 2) if is_classifier else vocabulary,
        "class_labels": settings.get("num_embeds_ada_norm") or 2,
        "timestep": _NUM_TIMES,
    }


def _cut(name: str, value: Any) -> Any:
    """Images and texts that come as many tokens: few of them are enough."""
    if name == "img_shapes":
        side = math.isqrt(_NUM_IMAGE_TOKENS)
        return [[(1, side, side)]] * len(value)
    if not isinstance(value, torch.Tensor):
        return value
    if name in ("img_ids", "txt_ids"):
        return value[:_NUM_IMAGE_TOKENS]
    if name == "hidden_states" and value.dim() == 5:  # frames, rows and columns of a video
        return value[:, :, :2, :4, :4]
    is_tokens = name in ("hidden_states", "encoder_hidden_states") and value.dim() == 3
    return value[:, :_NUM_IMAGE_TOKENS] if is_tokens else value


def _filled(name: str, value: Any, ranges: Mapping[str, int], generator: torch.Generator) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(key, one, ranges, generator) for key, one in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator).to(value.dtype)
    return torch.randint(0, ranges.get(name, 2), value.shape, generator=generator)


def _mask(made: dict[str, Any], num_masked: int, *, has_mask: bool) -> None:
    """Pad the end of the first row and leave labels out, so differently from batch to batch that
    the bits of bf16 losses show what each one weighs."""
    tokens, labels = made["input_ids"], made.get("labels")
    if has_mask:
        mask = torch.ones_like(tokens)
        mask[0, -num_masked:] = 0
        made["attention_mask"] = mask
    if labels is not None and labels.dim() == 2:
        labels[:, -num_masked:] = IGNORED_LABEL
