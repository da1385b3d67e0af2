"""Hooks on gradients of tensors that cross the cuts between blocks, and tensors there that share
memory: as in memory to the bit, or refused (with clipping, before anything is updated)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.vocabulary import Choice
from support.toy_models import Toy, ToyBlock
from support.toy_runs import (
    assert_same_toys,
    attach_toy,
    make_toy,
    run_toy,
    toy_optimizer,
    toy_steps,
)

CHOICES = [Choice.KEEP, Choice.RECOMPUTE]


def bound(tensor: torch.Tensor) -> torch.Tensor:
    """A hook for which the sum of two parts is not that of the whole."""
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return tensor


class Sided(ToyBlock):
    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if side is None else x * side)


class BoundsItsInput(Sided):
    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, side if side is None else bound(side))


class SharedSide(Toy):
    """One tensor enters every block."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        side = self.made(x)
        for block in self.blocks:
            x = block(x, side)
        return x

    def made(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x.mean(0))


class BoundSide(SharedSide):
    def made(self, x: torch.Tensor) -> torch.Tensor:
        return bound(super().made(x))


class BoundSideUsedLater(SharedSide):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        side = bound(self.made(x))
        return self.blocks[2](self.blocks[1](self.blocks[0](x, side) * side))


class BoundBetween(Toy):
    """Hooks on outputs of blocks that end in the code behind them."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.sin(bound(block(x)))
        return x


class BoundOutputs(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = bound(block(x))
        return x


class BoundOutputsOfAll(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for block in self.blocks:
            x = torch.sin(bound(block(x)))
            outputs.append(x)
        return sum(outputs[:-1], x)


class BoundAndKept(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for block in self.blocks:
            outputs.append(bound(block(x)))
            x = torch.sin(outputs[-1])
        return sum(outputs)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", [BoundSide, BoundBetween, BoundOutputsOfAll])
def test_hooks_on_tensors_outside_the_blocks_see_whole_gradients(
    kind: type[Toy], choice: Choice, tmp_path: Path
) -> None:
    assert_same_toys(*run_toy(lambda: kind(lambda _: Sided()), tmp_path, choice=choice))


class TwoNames(ToyBlock):
    """Gives the same memory twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = super().forward(x)
        return y, y.view(-1)


class ReadsBoth(Toy):
    def change(self, flat: torch.Tensor) -> None:
        """Leave it as it is."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, flat = block(x)
            self.change(flat)
            x = torch.sin(x) + flat.view_as(x)
        return x


class ChangesOne(ReadsBoth):
    def change(self, flat: torch.Tensor) -> None:
        flat.mul_(1.5)


class ChangesAPart(ReadsBoth):
    def change(self, flat: torch.Tensor) -> None:
        flat[2:5].mul_(1.5)


class ChangesUnseen(ReadsBoth):
    def change(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            flat.mul_(1.5)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", [ReadsBoth, ChangesUnseen])
def test_outputs_may_share_memory(kind: type[Toy], choice: Choice, tmp_path: Path) -> None:
    assert_same_toys(*run_toy(lambda: kind(lambda _: TwoNames()), tmp_path, choice=choice))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook of a block on its input": (
        lambda: SharedSide(lambda _: BoundsItsInput()),
        r"blocks\.0 puts a hook on the gradient of an argument",
    ),
    "hook on what is used later": (
        lambda: BoundSideUsedLater(lambda _: Sided()),
        "enters a block, and is used again later",
    ),
    "hook from block to block": (
        lambda: BoundOutputs(lambda _: ToyBlock()),
        "has a hook on its gradient, and is used by another block or later",
    ),
    "hook on outputs that are kept": (
        lambda: BoundAndKept(lambda _: ToyBlock()),
        "has a hook on its gradient, and is used by another block or later",
    ),
    "one of two names changed": (
        lambda: ChangesOne(lambda _: TwoNames()),
        "shares its memory with another output",
    ),
    "a part of one changed": (
        lambda: ChangesAPart(lambda _: TwoNames()),
        "shares its memory with another output",
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_give_other_gradients_is_refused(
    name: str, choice: Choice, tmp_path: Path
) -> None:
    make, words = REFUSED[name]
    model: Any = make_toy(make)
    with (
        attach_toy(model, toy_optimizer(model), tmp_path, choice=choice) as engine,
        pytest.raises(ConfigError, match=words),
    ):
        engine.step(toy_steps(1)[0])
