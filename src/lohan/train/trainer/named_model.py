"""A model a trainer is given by its name: opened and made without loading its weights.

Owns what of a trainer's arguments concerns it. The weights are streamed by `source`. Called by the
trainers.
"""

from typing import Any

import torch

from lohan.errors import ConfigError
from lohan.train.weights.source import ModelSource, open_source


def open_named(model: str, args: Any) -> ModelSource:
    """Open a model by name with what the arguments say about it."""
    settings = dict(getattr(args, "model_init_kwargs", None) or {})
    return open_source(
        model,
        revision=settings.get("revision"),
        trust_remote_code=bool(getattr(args, "trust_remote_code", False)),
        dtype=torch.float16 if getattr(args, "fp16", False) else torch.bfloat16,
    )


def make_named(source: ModelSource, args: Any) -> Any:
    """The model of a source. Of `model_init_kwargs` what concerns its code is honoured.

    Raises:
        ConfigError: another keyword is given.
    """
    settings = dict(getattr(args, "model_init_kwargs", None) or {})
    attention = settings.pop("attn_implementation", None)
    settings.pop("revision", None)
    if settings:
        raise ConfigError(
            f"model_init_kwargs has {', '.join(settings)}",
            why="weights are streamed to the SSDs, so only the model's code can be set",
            remedy="leave all but revision and attn_implementation out",
        )
    model = source.make_model()
    if attention is not None:
        model.set_attn_implementation(attention)  # type: ignore[operator]
    if args is not None:
        # TRL would warn that they are ignored.
        args.model_init_kwargs = None
    return model
