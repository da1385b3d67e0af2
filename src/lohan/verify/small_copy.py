"""A small model of the same architecture as a large one, with random values.

Owns finding the configuration of the large one (a known name, a file, a directory or a hub id, of
which nothing else is fetched), building the small one the way a run builds its model (transformers
models with their parameters on the meta device and values as a stream), and its twin in memory.
Called by `compare`.
"""

import inspect
import pathlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.model.configs import CONFIG_PLACES, read_config
from lohan.model.names import canonical_name, known_names
from lohan.model.paper_models import Dit, Gpt
from lohan.model.public_models import PAPER_DITS, PAPER_GPTS, PUBLIC_MODELS
from lohan.train.weights.meta_model import explained, model_class
from lohan.train.weights.model_places import find_place
from lohan.train.weights.source import source_of_config
from lohan.verify.batches import MakeBatch, batches_for, noise_loss
from lohan.verify.scaling import (
    NUM_LAYERS,
    NUM_POSITIONS,
    VOCABULARY,
    scale_diffusers,
    scale_transformers,
)

DTYPE = torch.bfloat16
_MOST_PARAMETERS = 20_000_000
"""More than this is no small model: training it would not be a matter of seconds."""
_PAPER_WIDTH, _PAPER_HEADS = 64, 4
_PAPER_LATENT, _PAPER_CLASSES = 8, 16

Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallCopy:
    """A small model that can be made as often as needed, always with the same values."""

    name: str
    """As the user wrote it."""
    architecture: str
    changes: tuple[str, ...]
    """What is smaller than in the original."""
    num_parameters: int
    make: Callable[[], nn.Module]
    """Module in training mode; its parameters may be on the meta device, its buffers are not."""
    make_batch: MakeBatch
    loss_fn: Loss | None
    gives_states: bool = False
    """Whether its forward gives hidden states with its loss."""

    def values(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and first value of every parameter; a name always has the same value."""
        for name, parameter in model.named_parameters():
            yield name, _value(name, tuple(parameter.shape))

    def in_memory(self, device: torch.device) -> nn.Module:
        """The model with its values, as plain PyTorch has it."""
        model = self.make()
        values = dict(self.values(model))
        made = {
            id(parameter): nn.Parameter(values[name], requires_grad=parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }
        for module in model.modules():
            for name, one in list(module._parameters.items()):
                if one is not None:
                    module._parameters[name] = made[id(one)]
        return model.to(device)


def make_small_copy(model: str, *, trust_remote_code: bool = False) -> SmallCopy:
    """Scale a model down.

    Args:
        model: a known name, a config.json, a model directory, a GGUF file or a hub id.

    Raises:
        ConfigError: there is no such model, or it cannot be scaled down.
        HardwareError: the hub cannot be reached.
    """
    with torch.random.fork_rng(devices=[]):  # building draws values that are not used
        copy = _copy_of(model, trust_remote_code)
    if copy.num_parameters > _MOST_PARAMETERS:
        raise ConfigError(
            f"{copy.architecture} cannot be scaled down",
            why=f"with all known sizes made small ({', '.join(copy.changes) or 'none'}) it still "
            f"has {copy.num_parameters:,} parameters",
            remedy="write a config.json with smaller sizes and give that",
        )
    return copy


def _copy_of(model: str, trust_remote_code: bool) -> SmallCopy:
    """Find the configuration of a model and build the copy.

    Raises:
        ConfigError: nothing of that name is there, or it is no configuration.
        HardwareError: the hub cannot be reached.
    """
    path = pathlib.Path(model).expanduser()
    known = canonical_name(model)
    if known is not None:
        return _known_copy(known, trust_remote_code)
    if path.suffix.lower() == ".gguf" and path.is_file():
        config = _read_transformers(path.parent, trust_remote_code, gguf_file=path.name)
        return _transformers_copy(model, config, path.parent, trust_remote_code)
    place = path if path.exists() and model.strip() else _from_hub(model)
    file, settings = read_config(place, needs_type=not trust_remote_code)
    name = model if not path.exists() else path.name or str(path)
    if "_class_name" in settings:
        return _diffusers_copy(name, settings)
    source = file.parent if file.name == "config.json" else file
    config = _read_transformers(source, trust_remote_code)
    return _transformers_copy(name, config, source, trust_remote_code)


def _known_copy(name: str, trust_remote_code: bool) -> SmallCopy:
    if name not in PUBLIC_MODELS:
        return _paper_copy(name)
    public = PUBLIC_MODELS[name]
    if public.model_type is None:
        return _diffusers_copy(name, public.settings)
    with explained(f"the known model {name} cannot be built", "install another transformers"):
        import transformers

        config = transformers.AutoConfig.for_model(public.model_type, **public.settings)
    return _transformers_copy(name, config, pathlib.Path(), trust_remote_code)


def _read_transformers(
    place: pathlib.Path, trust_remote_code: bool, gguf_file: str | None = None
) -> Any:
    """A configuration object."""
    with explained(
        f"the configuration in {place} cannot be used",
        "check it, and that this transformers knows the model; a model that brings its own code "
        "needs --trust-remote-code",
    ):
        import transformers

        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if gguf_file is not None:
            options["gguf_file"] = gguf_file
        return transformers.AutoConfig.from_pretrained(str(place), **options)


def _transformers_copy(
    name: str, config: Any, directory: pathlib.Path, trust_remote_code: bool
) -> SmallCopy:
    scaled = scale_transformers(config.to_dict())
    kind = model_class(config, directory, trust_remote_code=trust_remote_code)
    with explained(
        f"{kind.__name__} cannot be scaled down",
        "write a config.json with smaller sizes by hand and give that",
    ):
        smaller = type(config).from_dict(scaled.settings)
        if smaller.is_encoder_decoder and getattr(smaller, "decoder_start_token_id", None) is None:
            # Where labels are shifted in; files say it, defaults may not.
            smaller.decoder_start_token_id = smaller.pad_token_id or 0
        source = source_of_config(smaller, DTYPE, kind=kind)
        model = source.make_model()
        make_batch = batches_for(model, DTYPE)
    return SmallCopy(
        name=name,
        architecture=kind.__name__,
        changes=scaled.changes,
        num_parameters=_count(model),
        make=source.make_model,
        make_batch=make_batch,
        loss_fn=None,
        gives_states="labels" in inspect.signature(model.forward).parameters,
    )


def _diffusers_copy(name: str, settings: dict[str, Any]) -> SmallCopy:
    scaled = scale_diffusers(settings)
    with explained(
        f"{settings['_class_name']} cannot be scaled down",
        "check the configuration, and that this diffusers knows the model",
    ):
        import diffusers

        kind = getattr(diffusers, str(settings["_class_name"]))

        def make() -> nn.Module:
            made: Any = kind.from_config(scaled.settings)
            return _in_compute_type(made)

        model = make()
        make_batch = batches_for(model, DTYPE)
    return _plain_copy(name, scaled.changes, make, make_batch, noise_loss)


def _paper_copy(name: str) -> SmallCopy:
    large = PAPER_GPTS.get(name) or PAPER_DITS[name]

    def make() -> nn.Module:
        if name in PAPER_GPTS:
            return _in_compute_type(
                Gpt(
                    num_layers=NUM_LAYERS,
                    num_heads=_PAPER_HEADS,
                    hidden=_PAPER_WIDTH,
                    vocabulary=VOCABULARY,
                    longest_sequence=NUM_POSITIONS,
                )
            )
        return _in_compute_type(
            Dit(
                num_layers=NUM_LAYERS,
                num_heads=_PAPER_HEADS,
                hidden=_PAPER_WIDTH,
                latent=_PAPER_LATENT,
                num_classes=_PAPER_CLASSES,
            )
        )

    changes = (
        f"num_layers {large.num_layers} -> {NUM_LAYERS}",
        f"num_heads {large.num_heads} -> {_PAPER_HEADS}",
        f"hidden {large.hidden} -> {_PAPER_WIDTH}",
    )
    return _plain_copy(name, changes, make, batches_for(make(), DTYPE), None)


def _plain_copy(
    name: str,
    changes: tuple[str, ...],
    make: Callable[[], nn.Module],
    make_batch: MakeBatch,
    loss_fn: Loss | None,
) -> SmallCopy:
    model = make()
    return SmallCopy(
        name=name,
        architecture=type(model).__name__,
        changes=changes,
        num_parameters=_count(model),
        make=make,
        make_batch=make_batch,
        loss_fn=loss_fn,
    )


def _in_compute_type(model: nn.Module) -> nn.Module:
    """Parameters only: buffers keep the precision the model's code gives them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPE)
    return model.train()


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Random values of a size that lets gradients through; nothing starts at zero, for zeros
    (the last layers of diffusion models) would hide differences behind them."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    if len(shape) >= 2:
        noise.mul_(0.7 * shape[-1] ** -0.5)
    else:
        noise.mul_(0.1)
        if name.endswith("weight"):  # of a norm
            noise.add_(1.0)
    return noise.to(DTYPE)


def _from_hub(model: str) -> pathlib.Path:
    if "/" not in model:
        raise ConfigError(
            f"there is no model {model!r}",
            why="it is neither a known name, an existing file or folder, nor of the form of a hub "
            "id (owner/name)",
            remedy=f"check the path, or use a known name: {', '.join(known_names())}",
        )
    return find_place(model, wanted=CONFIG_PLACES).directory
