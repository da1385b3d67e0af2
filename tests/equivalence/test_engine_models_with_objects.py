"""Models that keep what they need in plain objects, nested containers, closures and hooks: an extra
forward, a re-run or a micro-batch beside them changes no bit; what cannot be right is refused."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.vocabulary import Choice
from support.engine_runs import EngineCase, build, optimizer_for
from support.odd_runs import start
from support.tiny_models import TINY_MODELS
from support.toy_models import WIDTH, Toy, ToyBlock
from support.toy_runs import (
    assert_same_toys,
    attach_toy,
    make_toy,
    run_toy,
    toy_optimizer,
    toy_steps,
)


class Scaled(ToyBlock):
    """By what the model has put into an object that both of them hold, or a mapping."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.context = context

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_mapping = isinstance(self.context, dict)
        scale = self.context["scale"] if is_mapping else self.context.scale
        return super().forward(x) * scale


class ScaledToy(Toy):
    def __init__(self, context: Any) -> None:
        super().__init__(lambda _: Scaled(context))
        self.context = context

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        scale = x.detach().abs().amax()
        if isinstance(self.context, dict):
            self.context["scale"] = scale
        else:
            self.context.scale = scale
        return super().forward(x)


@pytest.mark.parametrize("make_context", [dict, types.SimpleNamespace])
@pytest.mark.parametrize("num_micro_batches", [2, 3])
def test_every_micro_batch_finds_what_it_left_in_objects(
    make_context: Callable[[], Any], num_micro_batches: int, tmp_path: Path
) -> None:
    steps = toy_steps(2, num_micro_batches)
    ours, theirs = run_toy(
        lambda: ScaledToy(make_context()), tmp_path, steps=steps, choice=Choice.RECOMPUTE
    )
    assert_same_toys(ours, theirs)


class Table:
    """Made when it is first needed."""

    values: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.values is None:
            self.values = torch.linspace(0.5, 2.0, WIDTH, dtype=x.dtype)
        return x * self.values


class TableToy(Toy):
    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        self.table = Table()

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(self.table(x))


def test_a_table_that_an_object_makes_when_needed_is_real(tmp_path: Path) -> None:
    assert_same_toys(*run_toy(TableToy, tmp_path))


def test_a_loss_function_is_left_as_it_was(tmp_path: Path) -> None:
    """It is traced, and run once to count random numbers: neither shows."""
    found: list[torch.Tensor] = []

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch)[0]
        found.append(loss.detach())
        return loss * len(found)

    model, steps = make_toy(lambda: Toy(lambda _: ToyBlock())), toy_steps(1, 2)
    with attach_toy(model, toy_optimizer(model), tmp_path, loss_fn=loss_fn) as engine:
        losses = engine.step(steps[0]).losses
    assert [float(one) * (1 + index) / 2 for index, one in enumerate(found)] == list(losses)


def test_a_loss_function_whose_labels_are_followed_is_left_as_it_was(tmp_path: Path) -> None:
    """A step finds out which labels count by running the loss on tensors without values."""
    case, tiny = EngineCase(num_micro_batches=2), TINY_MODELS["llama"]
    batches = [tiny.batch(seed, torch.bfloat16) for seed in range(2)]
    batches[1]["labels"][:, 4:] = -100  # Shares depend on whether first labels count.
    found: list[torch.Tensor] = []

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        found.append(model(**batch).loss)
        return found[-1]

    model = build(case)
    with start(case, model, optimizer_for(case, model), tmp_path, batches[0]) as engine:
        losses = engine.step(batches, loss_fn).losses
    counts = [10, 6]  # of 12 and 8, without those of first tokens
    assert [float(one.detach() * (own / 16)) for one, own in zip(found, counts, strict=True)] == [
        *losses
    ]


class TwoWays(Toy):
    """The loss reads what a block gave, and what was made of it before the next one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x, kept = self.enter(x), []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
            x = x + 0.5
            kept.append(x)
        return (self.leave(x).square().mean() + sum(one.square().mean() for one in kept),)


def test_a_gradient_that_would_be_added_twice_is_refused(tmp_path: Path) -> None:
    model = make_toy(lambda: TwoWays(lambda _: ToyBlock()))
    with (
        attach_toy(model, toy_optimizer(model), tmp_path) as engine,
        pytest.raises(ConfigError, match="its gradient would be summed up twice"),
    ):
        engine.step(toy_steps(1, 1)[0])
