"""How a small denoiser of diffusers is written down: its settings, and its inputs by name.

An input is a function of a generator and a type, so that every micro-batch has values of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Make = Callable[[torch.Generator, torch.dtype], Any]


@dataclass(frozen=True, kw_only=True)
class Denoiser:
    """Settings of a small model and what its forward takes."""

    settings: dict[str, Any]
    inputs: dict[str, Make]


def floats(*shape: int) -> Make:
    """Normal noise."""
    return lambda generator, dtype: torch.randn(shape, generator=generator).to(dtype)


def whole(below: int, *shape: int) -> Make:
    """Whole numbers."""
    return lambda generator, _: torch.randint(0, below, shape, generator=generator)


def ones(*shape: int, dtype: torch.dtype = torch.bool) -> Make:
    """A mask that leaves the end of the first row out."""

    def make(_: torch.Generator, __: torch.dtype) -> torch.Tensor:
        mask = torch.ones(shape, dtype=dtype)
        mask[0, -1] = 0
        return mask

    return make


def given(value: Any) -> Make:
    """Always the same."""
    return lambda _, __: value


def several(*parts: Make) -> Make:
    """A list."""
    return lambda generator, dtype: [part(generator, dtype) for part in parts]


def ids(num: int, width: int) -> Make:
    """Places of tokens, always the same."""
    places = torch.arange(num * width).view(num, width) % 5
    return given(places.to(torch.float32))


def denoiser(settings: dict[str, Any], **inputs: Make) -> Denoiser:
    """In one call."""
    return Denoiser(settings=settings, inputs=inputs)
