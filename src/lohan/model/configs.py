"""From a configuration or a known name to a traced `ModelShape`.

Owns building modules without memory (on the `meta` device) and choosing how they are traced. Never
downloads and never runs code that comes with a configuration. Imports torch at once, transformers
and diffusers when needed; imported by `names` on demand.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lohan.errors import ConfigError, LohanError
from lohan.model.assemble import trace_shape
from lohan.model.inputs import inputs_for
from lohan.model.names import check_sequence
from lohan.model.paper_models import Dit, Gpt
from lohan.model.public_models import PAPER_DITS, PAPER_GPTS, PUBLIC_MODELS
from lohan.model.shape import ModelShape

CONFIG_PLACES = ("config.json", "transformer/config.json", "unet/config.json")
Adapted = Callable[[nn.Module], nn.Module]
"""Puts adapters on a model that is on the meta device."""
_DTYPE = torch.bfloat16
"""What weights and activations are computed in."""


def build_known(name: str) -> nn.Module:
    """Return a known model on the `meta` device, in training mode.

    Args:
        name: one of `names.known_names()`.
    """
    if name in PUBLIC_MODELS:
        public = PUBLIC_MODELS[name]
        if public.model_type is None:
            return _from_diffusers(public.settings, name)
        return _from_transformers({"model_type": public.model_type, **public.settings}, name)
    kind, sizes = (Gpt, PAPER_GPTS) if name in PAPER_GPTS else (Dit, PAPER_DITS)
    paper = sizes[name]
    with torch.device("meta"):
        return kind(num_layers=paper.num_layers, num_heads=paper.num_heads, hidden=paper.hidden)


def trace_known(name: str, *, adapted: Adapted | None = None) -> ModelShape:
    """Trace a known model anew; what is shipped for it is exactly this, without adapters."""
    known = PUBLIC_MODELS.get(name) or PAPER_GPTS.get(name) or PAPER_DITS[name]
    model = build_known(name)
    return _trace(
        model if adapted is None else adapted(model),
        name=name,
        nominal_parameters=known.nominal_parameters,
    )


def shape_of_path(
    path: pathlib.Path, *, sequence: int | None, adapted: Adapted | None = None
) -> ModelShape:
    """Trace the model a configuration file or folder describes.

    Raises:
        ConfigError: if there is no configuration, or it cannot be built or traced.
    """
    file, settings = read_config(path)
    is_diffusers = "_class_name" in settings
    model = (_from_diffusers if is_diffusers else _from_transformers)(settings, str(file))
    name = file.parent.name if file.name == "config.json" else file.stem
    return _trace(
        model if adapted is None else adapted(model),
        name=name or type(model).__name__,
        sequence=sequence,
    )


def _trace(
    model: nn.Module,
    *,
    name: str,
    sequence: int | None = None,
    nominal_parameters: float | None = None,
) -> ModelShape:
    num_positions = _num_positions(model)
    check_sequence(name, sequence, num_positions)
    make_inputs, is_fixed = inputs_for(model, _DTYPE)
    return trace_shape(
        model,
        make_inputs,
        name=name,
        dtype=_DTYPE,
        longest_sequence=num_positions,
        is_sequence_fixed=is_fixed,
        should_assume_flash=True,
        nominal_parameters=nominal_parameters,
    )


def _num_positions(model: nn.Module) -> int | None:
    """Return the rows of the smallest table of learned positions, where one can be told."""
    if isinstance(model, Gpt):
        return model.longest_sequence
    settings = getattr(model, "config", None)
    longest = getattr(settings, "n_positions", None) or getattr(
        settings, "max_position_embeddings", None
    )
    if not isinstance(longest, int):
        return None
    tables = (m for m in model.modules() if isinstance(m, nn.Embedding))
    # OPT keeps two more rows than positions; rotary models have no table of that size at all.
    is_learned = any(table.num_embeddings in (longest, longest + 2) for table in tables)
    return longest if is_learned else None


def read_config(
    path: pathlib.Path, *, needs_type: bool = True
) -> tuple[pathlib.Path, dict[str, Any]]:
    """The configuration in a file or in a model's folder: which file it is, and its settings.

    Raises:
        ConfigError: there is none, or it is no model's. `needs_type`: it says which model's.
    """
    places = [path] if path.is_file() else [path / place for place in CONFIG_PLACES]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        found = sorted(entry.name for entry in path.iterdir())[:8]
        raise ConfigError(
            f"{path} holds no model configuration",
            why=f"{' or '.join(CONFIG_PLACES)} was looked for; it holds {found}",
            remedy="give the folder of a transformers or diffusers model",
        )
    remedy = "give the config.json of a transformers or diffusers model"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read as JSON", why=str(error), remedy=remedy
        ) from error
    why = None if isinstance(settings, dict) else "it is no JSON object"
    if why is None and needs_type and not settings.keys() & {"_class_name", "model_type"}:
        why = "it has neither a model_type (transformers) nor a _class_name (diffusers)"
    if why is not None:
        raise ConfigError(f"{file} is not the configuration of a model", why=why, remedy=remedy)
    return file, settings


def _from_transformers(settings: dict[str, Any], where: str) -> nn.Module:
    with _building(where, "transformers"):
        import transformers

        model_type = str(settings["model_type"])
        if model_type not in transformers.CONFIG_MAPPING:
            raise ConfigError(
                f"{where} has the model_type {model_type!r}",
                why=f"transformers {transformers.__version__} knows no such model",
                remedy="check the spelling, or install a transformers that knows it",
            )
        kind = transformers.CONFIG_MAPPING[model_type]
        config = kind.from_dict({key: v for key, v in settings.items() if key != "auto_map"})
        names = settings.get("architectures") or [None]
        architecture = getattr(transformers, str(names[0]), None)
        with torch.device("meta"):
            if architecture is not None:
                return _in_training(architecture(config))
            chosen: Any = transformers.AutoModelForCausalLM
            return _in_training(chosen.from_config(config))


def _from_diffusers(settings: dict[str, Any], where: str) -> nn.Module:
    with _building(where, "diffusers"):
        import diffusers

        kind = getattr(diffusers, str(settings["_class_name"]))
        if not issubclass(kind, nn.Module):
            raise ConfigError(
                f"{where} describes a {kind.__name__}",
                why="it is not a model",
                remedy="give the folder of a transformer, or a pipeline's folder",
            )
        with torch.device("meta"):
            return _in_training(kind.from_config(settings))


def _in_training(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    if getattr(model, "loss_type", "") is None:
        # What transformers falls back to for GPT-2 and others, without its warning.
        vars(model)["loss_type"] = "ForCausalLM"
    return model.train()


@contextlib.contextmanager
def _building(where: str, package: str) -> Iterator[None]:
    try:
        yield
    except LohanError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where} needs the package {package}",
            why=str(error),
            remedy='install it: pip install "lohan[models]"',
        ) from error
    except Exception as error:
        # Over several lines, the first often only says where it was found.
        reason = " ".join(str(error).split())[:300] or "no message"
        raise ConfigError(
            f"{where} does not make a model with {package}",
            why=f"{type(error).__name__}: {reason}",
            remedy=f"check the configuration, and that this {package} knows the model",
        ) from error
