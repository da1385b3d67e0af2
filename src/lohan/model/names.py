"""From what a user writes for a model to its `ModelShape`.

Owns the reading of names and paths, and the shapes shipped as files for the known names,
so that planning them, and searching them for what fits, needs no torch. Tracing is imported only
when something has to be traced. Called by the commands, the planner's tests and the engine.
"""

import difflib
import pathlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from lohan.errors import ConfigError
from lohan.model.public_models import (
    ALIASES,
    GPT_SEQUENCE,
    PAPER_DITS,
    PAPER_GPTS,
    PUBLIC_MODELS,
)
from lohan.model.shape import ModelShape

if TYPE_CHECKING:
    from torch import nn

_TUNED = ("-instruct", "-base", "-chat")


def known_names() -> tuple[str, ...]:
    """Return the names `shape_of` answers without tracing, the paper's first."""
    return (*PAPER_GPTS, *PAPER_DITS, *PUBLIC_MODELS)


def shape_of(
    model: str | pathlib.Path,
    *,
    sequence: int | None = None,
    adapted: "Callable[[nn.Module], nn.Module] | None" = None,
) -> ModelShape:
    """Return what a model needs.

    Args:
        model: a known name in any case (`gpt-13b`, `Llama-3.1-8B`, also with its owner in front);
            a transformers `config.json` or its folder; a diffusers transformer or pipeline folder.
        sequence: the longest sequence that will be used. The paper's GPTs get positions for it; a
            model that cannot take it is refused.
        adapted: puts adapters on a model, which is then traced with them.

    Raises:
        ConfigError: for an unknown name, a file that is no configuration, a sequence the model
            cannot take, or a model that cannot be traced.
    """
    if sequence is not None and sequence < 1:
        raise ConfigError(
            f"a sequence of {sequence} tokens is not possible",
            why="it is below 1",
            remedy="give 1 or more",
        )
    path = pathlib.Path(model).expanduser()
    name = canonical_name(str(model))
    if name is None:
        if not str(model).strip() or not path.exists():
            raise _unknown(str(model))
        from lohan.model.configs import shape_of_path

        return shape_of_path(path, sequence=sequence, adapted=adapted)
    if adapted is None:
        shipped = resources.files("lohan.model") / "shapes" / f"{name}.json"
        shape = ModelShape.from_json(shipped.read_text(encoding="utf-8"))
    else:
        from lohan.model.configs import trace_known

        shape = trace_known(name, adapted=adapted)
    return _with_sequence(shape, name, sequence)


def canonical_name(text: str) -> str | None:
    """Return the known name meant by a text, or None.

    Case, an owner in front (`meta-llama/`) and endings such as `-Instruct` do not matter: they do
    not change what the model needs.
    """
    if text.startswith((".", "/", "~")):
        return None  # A path, whatever it is called.
    name = text.strip().lower().replace("_", "-").rpartition("/")[2]
    for spelling in (name, *(name.removesuffix(end) for end in _TUNED)):
        spelling = ALIASES.get(spelling, spelling)
        if spelling in PAPER_GPTS or spelling in PAPER_DITS or spelling in PUBLIC_MODELS:
            return spelling
    return None


def _with_sequence(shape: ModelShape, name: str, sequence: int | None) -> ModelShape:
    if sequence is None:
        return shape
    if name in PAPER_GPTS:
        if sequence <= GPT_SEQUENCE:
            return shape
        # Positions are the only part whose size depends on the longest sequence.
        extra = (sequence - GPT_SEQUENCE) * PAPER_GPTS[name].hidden
        embedding = shape.kinds[0]
        longer = replace(embedding, num_parameters=embedding.num_parameters + extra)
        return replace(shape, kinds=(longer, *shape.kinds[1:]))
    if name in PUBLIC_MODELS:
        check_sequence(name, sequence, PUBLIC_MODELS[name].settings.get("n_positions"))
    if shape.tokens_per_sample is not None and sequence != shape.tokens_per_sample:
        raise ConfigError(
            f"{name} works on {shape.tokens_per_sample} tokens per sample, not {sequence}",
            why="the number of tokens follows from the size of its images",
            remedy="leave the sequence length out",
        )
    return shape


def check_sequence(name: str, sequence: int | None, num_positions: int | None) -> None:
    """Refuse a sequence longer than a model's table of learned positions.

    Raises:
        ConfigError: if there is such a table and it is too short.
    """
    if sequence is not None and num_positions is not None and sequence > num_positions:
        raise ConfigError(
            f"{name} cannot take sequences of {sequence} tokens",
            why=f"it has {num_positions} learned positions",
            remedy=f"use at most {num_positions} tokens, or a model with rotary positions",
        )


def _unknown(text: str) -> ConfigError:
    names = known_names()
    nearest = difflib.get_close_matches(text.lower(), [*names, *ALIASES], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(nearest)}? Known names" if nearest else "use a known name"
    return ConfigError(
        f"no model is called {text!r}",
        why="it is neither a known name nor an existing file or folder",
        remedy=f"{hint}: {', '.join(names)}; or give a transformers config.json or a diffusers "
        "folder",
    )


@lru_cache(maxsize=8)
def _language_models(sequence: int) -> tuple[ModelShape, ...]:
    """Language models that can take sequences of this length."""
    shapes = []
    for name in known_names():
        try:
            shape = shape_of(name, sequence=sequence)
        except ConfigError:
            continue  # It cannot take the sequence, or fixes its own.
        if shape.tokens_per_sample is None:
            shapes.append(shape)
    return tuple(shapes)


@lru_cache(maxsize=1)
def _diffusion_models() -> tuple[ModelShape, ...]:
    """Diffusion transformers, whose images fix the sequence."""
    shapes = (shape_of(name) for name in known_names() if name.startswith("dit-"))
    return tuple(shapes)


def models_like(shape: ModelShape, sequence: int) -> tuple[ModelShape, ...]:
    """Known models that do the same kind of work as this one."""
    return _language_models(sequence) if shape.tokens_per_sample is None else _diffusion_models()
