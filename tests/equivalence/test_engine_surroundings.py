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
from support.toy_models import WIDTH, Toy, ToyBlock
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


class ChangesAScale(Toy):
    """Changes what it reads elsewhere: in place, where each micro-batch would find another's."""

    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        self.register_buffer("scale", torch.ones((), dtype=torch.bfloat16))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(1 + x.detach().mean())
        return super().body(x) * self.scale


class ChangesAnAttribute(ChangesAScale):
    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = torch.ones((), dtype=torch.bfloat16)


class ChangesForBlocks(AssignsAnAttribute):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(1 + x.detach().mean())
        return Toy.body(self, x)


class ChangesAfter(ChangesAScale):
    """The next micro-batch has read it before."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = Toy.body(self, x * self.scale.clone())
        self.scale.mul_(1 + x.detach().mean())
        return x


class ClearsAList(Toy):
    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        self.means: list[torch.Tensor] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.means.clear()
        for block in self.blocks:
            x = block(x)
            self.means.append(x.detach().mean())
        return x + sum(self.means)


class CountingPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones((), dtype=torch.bfloat16))


class CountsInAll(ToyBlock):
    def __init__(self, part: CountingPart) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.count += 0.125
        return super().forward(x) * self.part.count.clone()


class SharesAPart(Toy):
    def __init__(self) -> None:
        part = CountingPart()
        super().__init__(lambda _: CountsInAll(part))


MIXED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "buffer": (ChangesAScale, "scale is changed in place"),
    "attribute": (ChangesAnAttribute, "scale is changed in place"),
    "read by blocks": (ChangesForBlocks, "scale is changed in place"),
    "changed after": (ChangesAfter, "scale is changed in place"),
    "list": (ClearsAList, "change what is in means"),
    "module in all blocks": (SharesAPart, r"part\.count is changed in place"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_micro_batches_would_mix_up_is_refused_before_the_first_step(
    name: str, tmp_path: Path
) -> None:
    make, words = MIXED[name]
    model = make_toy(make)
    with (
        attach_toy(model, toy_optimizer(model), tmp_path) as engine,
        pytest.raises(ConfigError, match=words),
    ):
        engine.step(toy_steps(1)[0])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", [ChangesAScale, ChangesAnAttribute, ClearsAList, SharesAPart])
def test_one_micro_batch_has_the_model_to_itself(
    kind: Callable[[], nn.Module], choice: Choice, tmp_path: Path
) -> None:
    assert_same_toys(*run_toy(kind, tmp_path, steps=toy_steps(3, 1), choice=choice))


class NormBefore(Toy):
    """Statistics that one part of the model reads and writes are in order."""

    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.bfloat16)
        self.history: list[torch.Tensor] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(x.detach().mean())
        return super().body(self.norm(x) * self.history[-1])


class NormAfter(NormBefore):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(x.detach().mean())
        return self.norm(Toy.body(self, x)) * self.norm.running_var.clone()


@pytest.mark.parametrize("kind", [NormBefore, NormAfter])
def test_what_one_part_of_the_model_has_to_itself_may_change(
    kind: Callable[[], nn.Module], tmp_path: Path
) -> None:
    assert_same_toys(*run_toy(kind, tmp_path))


class Precise(Toy):
    """Makes constants in fp64 while its blocks run."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return super().body(x)
        finally:
            torch.set_default_dtype(before)


class ConstantBlock(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        third = torch.linspace(0, 1, WIDTH) * 3
        assert third.dtype is torch.float64
        return super().forward(x) + third.sin().to(x.dtype)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_default_type_is_that_of_the_model_around_each_block(
    choice: Choice, tmp_path: Path
) -> None:
    assert_same_toys(*run_toy(lambda: Precise(lambda _: ConstantBlock()), tmp_path, choice=choice))
    assert torch.get_default_dtype() is torch.float32
