"""What a trainer is given: its parameters by name, and a model by its name, without its weights.

Owns what of a trainer's arguments concerns the model. The weights are streamed by `source`. Called
by the trainers.
"""

import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lohan.errors import ConfigError, LohanWarning
from lohan.train.data.tokenizing import with_template
from lohan.train.weights.source import ModelSource, open_source

_WITHOUT_EFFECT = {
    "dtype": "weights compute in bf16 or fp16, as these arguments say, from fp32 masters",
    "torch_dtype": "weights compute in bf16 or fp16, as these arguments say, from fp32 masters",
    "device_map": "the planner decides where weights are, and offload.device where they compute",
}


def named_parameters(
    kind: type, mixin: type, given: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """All that a trainer is made with by name, as the trainer that `mixin` stands before has it.

    Raises:
        TypeError: as a call of that trainer.
    """
    behind = kind.__mro__[kind.__mro__.index(mixin) + 1 :]
    makers = [vars(one)["__init__"] for one in behind if "__init__" in vars(one)]
    signatures = [inspect.signature(one) for one in makers if inspect.isfunction(one)]
    known = next(one for one in signatures if "model" in one.parameters)
    _, *names = known.parameters
    if len(given) > len(names):
        raise TypeError(
            f"{kind.__name__} takes {len(names)} parameters, and {len(given)} are given"
        )
    twice = [name for name in names[: len(given)] if name in named]
    if twice:
        raise TypeError(f"{kind.__name__} is given {twice[0]} twice")
    return {**dict(zip(names, given, strict=False)), **named}


def open_named(model: str, args: Any, head: str | None = None) -> ModelSource:
    """Open a model by name with what the arguments say about it."""
    settings = dict(getattr(args, "model_init_kwargs", None) or {})
    return open_source(
        model,
        revision=settings.get("revision"),
        trust_remote_code=bool(
            getattr(args, "trust_remote_code", False) or settings.get("trust_remote_code")
        ),
        dtype=torch.float16 if getattr(args, "fp16", False) else torch.bfloat16,
        head=head,
        seed=int(getattr(args, "seed", 0)),
    )


def templated(source: ModelSource, args: Any, tokenizer: Any) -> Any:
    """The tokenizer with the template of another model, where `chat_template_path` names one."""
    path = getattr(args, "chat_template_path", None)
    if not path or os.path.isfile(path):
        return tokenizer  # TRL reads a file
    warnings.warn(
        f"the chat template of {path} is taken, and no token of it: of a model given by name the "
        "embedding keeps its size",
        LohanWarning,
        stacklevel=2,
    )
    return with_template(tokenizer or source.load_tokenizer(), args)


def make_named(source: ModelSource, args: Any) -> Any:
    """The model of a source. Of `model_init_kwargs` what concerns its code is honoured.

    Raises:
        ConfigError: another keyword is given.
    """
    settings = dict(getattr(args, "model_init_kwargs", None) or {})
    attention = settings.pop("attn_implementation", None)
    for name in ("revision", "trust_remote_code", "low_cpu_mem_usage"):
        settings.pop(name, None)
    use_cache = settings.pop("use_cache", None)
    for name, why in _WITHOUT_EFFECT.items():
        value = settings.pop(name, None)
        is_so = str(value).removeprefix("torch.") in ("auto", str(source.dtype).partition(".")[2])
        if value is not None and (name == "device_map" or not is_so):
            warnings.warn(
                f"without effect: model_init_kwargs.{name}: {why}", LohanWarning, stacklevel=2
            )
    if settings:
        raise ConfigError(
            f"model_init_kwargs has {', '.join(settings)}",
            why="weights are streamed to the SSDs, so only the model's code can be set",
            remedy="leave all but revision, attn_implementation and use_cache out",
        )
    model: Any = source.make_model()
    if attention is not None:
        model.set_attn_implementation(attention)
    if use_cache is not None:
        model.config.use_cache = use_cache
    if args is not None:
        # TRL would warn that they are ignored.
        args.model_init_kwargs = None
    return model
