"""What blocks read that is neither argument nor weight: context variables, attributes and buffers
of other modules. Micro-batches go side by side, and each finds its own."""

import contextvars
from collections.abc import Callable
from pathlib import Path

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
SCALE: contextvars.ContextVar[float | torch.Tensor] = contextvars.ContextVar("scale", default=1.0)


class ScaledBlock(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * SCALE.get()


class Scaling(Toy):
    """Sets a variable for the time of its blocks, from its batch."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        token = SCALE.set(SCALE.get() + x.detach().mean())
        try:
            return super().body(x)
        finally:
            SCALE.reset(token)


@pytest.mark.parametrize("choice", CHOICES)
def test_context_variables_reach_the_model_and_its_blocks(choice: Choice, tmp_path: Path) -> None:
    token = SCALE.set(2.0)
    try:
        assert_same_toys(
            *run_toy(lambda: Scaling(lambda _: ScaledBlock()), tmp_path, choice=choice)
        )
    finally:
        SCALE.reset(token)


LOSSES: contextvars.ContextVar[list[torch.Tensor] | None] = contextvars.ContextVar(
    "losses", default=None
)


class LosingBlock(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        losses = LOSSES.get()
        if losses is not None:
            losses.append(y.square().mean())
        return y


class Collecting(Toy):
    """Gathers losses of its blocks behind their outputs."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        token = LOSSES.set(found := [])
        try:
            (loss,) = super().forward(x)
        finally:
            LOSSES.reset(token)
        return (loss + sum(found),)


@pytest.mark.parametrize("choice", CHOICES)
def test_losses_that_blocks_put_into_a_list_somewhere_are_refused(
    choice: Choice, tmp_path: Path
) -> None:
    """They used to get lost without a word, since blocks did not see the list."""
    model = make_toy(lambda: Collecting(lambda _: LosingBlock()))
    with (
        attach_toy(model, toy_optimizer(model), tmp_path, choice=choice) as engine,
        pytest.raises(ConfigError, match="that a block made and did not return"),
    ):
        engine.step(toy_steps(1)[0])


class ReadsItsModel(ToyBlock):
    """Knows the model around it, behind the back of `modules()`."""

    model: list[nn.Module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.model[0].scale


class AssignsAnAttribute(Toy):
    def __init__(self) -> None:
        super().__init__(lambda _: ReadsItsModel())
        self.scale = torch.ones((), dtype=torch.bfloat16)
        for block in self.blocks:
            block.model = [self]

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale * (1 + x.detach().mean())
        return super().body(x)


class AssignsABuffer(AssignsAnAttribute):
    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.register_buffer("scale", torch.ones((), dtype=torch.bfloat16))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", [AssignsAnAttribute, AssignsABuffer])
def test_blocks_read_what_their_own_micro_batch_left_in_the_model(
    kind: Callable[[], nn.Module], choice: Choice, tmp_path: Path
) -> None:
    assert_same_toys(*run_toy(kind, tmp_path, choice=choice))
