"""A small model of the same architecture as a large one, with random values.

Owns building it the way a run builds its model (transformers models with their parameters on the
meta device and values as a stream), and its twin in memory. Called by `compare`.
"""

import inspect
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.model.paper_models import Dit, Gpt
from lohan.model.public_models import PAPER_DITS, PAPER_GPTS
from lohan.train.weights.meta_model import explained, model_class
from lohan.train.weights.source import source_of_config
from lohan.verify.asked_model import AskedModel, find_model
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
    asked = find_model(model, trust_remote_code=trust_remote_code)
    with torch.random.fork_rng(devices=[]):  # building draws values that are not used
        if asked.known is not None:
            copy = _paper_copy(asked.known)
        elif asked.diffusers is not None:
            copy = _diffusers_copy(asked.name, asked.diffusers)
        else:
            copy = _transformers_copy(asked, trust_remote_code)
    if copy.num_parameters > _MOST_PARAMETERS:
        raise ConfigError(
            f"{copy.architecture} cannot be scaled down",
            why=f"with all known sizes made small ({', '.join(copy.changes) or 'none'}) it still "
            f"has {copy.num_parameters:,} parameters",
            remedy="write a config.json with smaller sizes and give that",
        )
    return copy


def _transformers_copy(asked: AskedModel, trust_remote_code: bool) -> SmallCopy:
    config = asked.transformers
    assert config is not None
    scaled = scale_transformers(config.to_dict())
    kind = model_class(config, asked.directory, trust_remote_code=trust_remote_code)
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
        name=asked.name,
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
