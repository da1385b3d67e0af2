"""Blocks that touch more than their result: as in memory to the bit, or refused with a reason."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lohan.drive.captured.graphs import Graph
from lohan.errors import ConfigError
from lohan.optimizer.torch_optimizer import AdamW
from support.toy_models import WIDTH, Toy, ToyBlock
from support.toy_runs import (
    assert_same_toys,
    attach_toy,
    make_toy,
    run_toy,
    toy_optimizer,
    toy_steps,
)


class SideBlock(ToyBlock):
    """Reads a tensor without a gradient that autograd need not keep."""

    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(x)
        return y if side is None else torch.tanh(y + side)


class SideChangesLater(Toy):
    """Changes an input of its first block when the second has run, which plain autograd allows."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        side = torch.ones(WIDTH, dtype=x.dtype)
        x = self.blocks[1](self.blocks[0](x, side))
        side.sub_(1.0)
        return self.blocks[2](x, side)


class CollectingBlock(ToyBlock):
    """Adds to a list it is given."""

    def forward(self, x: torch.Tensor, collected: list[torch.Tensor]) -> torch.Tensor:
        y = super().forward(x)
        collected.append(y.square().mean())
        return y


class Collecting(Toy):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        collected: list[torch.Tensor] = []
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, collected)
        return (self.leave(x).square().mean() + sum(collected),)


REFUSED = {
    "side input changed later": (SideChangesLater, SideBlock, "entered block blocks.0 was changed"),
    "list filled by blocks": (Collecting, CollectingBlock, "block blocks.0 changes an argument"),
}


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_block_that_changes_its_inputs_is_refused(name: str, device: str, tmp_path: Path) -> None:
    kind, block, words = REFUSED[name]
    model = make_toy(lambda: kind(lambda _: block()))
    with (
        attach_toy(model, toy_optimizer(model), tmp_path, device=device) as engine,
        pytest.raises(ConfigError, match=words),
    ):
        engine.step(toy_steps(1, 1)[0])


class AssigningBlock(ToyBlock):
    """Puts another tensor in the place of a buffer; keeps a figure for whoever logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.count = self.count + 1
        self.mean = (x.detach() * self.count).float().mean()
        return super().forward(x) + self.count * 0.125


class LateStatistics(ToyBlock):
    """Begins to change its buffer when it is told to."""

    is_on = False

    def __init__(self, num_values: int = 1) -> None:
        super().__init__()
        self.register_buffer("late", torch.zeros(num_values, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_on:
            self.late += 0.125
        return super().forward(x) + self.late[0] * x


class LateNorm(ToyBlock):
    """Its norm, which writes to statistics without saying so, is put into training mode later."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x)) * self.norm.running_mean.exp()


def begin_late(step: int, model: nn.Module, optimizer: AdamW) -> None:
    for block in model.blocks:
        block.is_on = step >= 1
        if isinstance(block, LateNorm):
            block.norm.train(step >= 1)


CHANGING = {"assigned": AssigningBlock, "in place": LateStatistics, "a norm": LateNorm}


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("name", CHANGING)
def test_buffers_that_blocks_change_are_changed_once(
    name: str, device: str, tmp_path: Path
) -> None:
    assert_same_toys(
        *run_toy(
            lambda: Toy(lambda _: CHANGING[name]()),
            tmp_path,
            steps=toy_steps(4, 2),
            change=begin_late,
            device=device,
        )
    )


def test_attributes_of_blocks_are_those_of_the_forward(tmp_path: Path) -> None:
    model = make_toy(lambda: Toy(lambda _: AssigningBlock()))
    first = model.blocks[0]
    batch = toy_steps(1, 1)[0][0]
    with torch.no_grad():
        expected = model.enter(batch["x"]).float().mean()
    with attach_toy(model, toy_optimizer(model), tmp_path) as engine:
        engine.step([batch])
    assert float(first.mean) == pytest.approx(float(expected), rel=1e-2)
    assert first.num_calls == 1


def test_a_large_buffer_that_begins_to_change_is_refused(tmp_path: Path) -> None:
    model = make_toy(lambda: Toy(lambda _: LateStatistics(100_000)))
    batches = toy_steps(1, 1)[0]
    with attach_toy(model, toy_optimizer(model), tmp_path) as engine:
        engine.step(batches)
        begin_late(1, model, engine.optimizer)
        with pytest.raises(ConfigError, match=r"block blocks\.0 changes its buffer late"):
            engine.step(batches)


def test_a_parameter_of_somebody_else_in_the_loss_is_refused(tmp_path: Path) -> None:
    model, temperature = make_toy(lambda: Toy(lambda _: ToyBlock())), nn.Parameter(torch.ones(()))

    def tempered(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return model(batch["x"])[0] * temperature

    with (
        attach_toy(model, toy_optimizer(model), tmp_path, loss_fn=tempered) as engine,
        pytest.raises(ConfigError, match=r"shape \(\) that is not the model's got a gradient"),
    ):
        engine.step(toy_steps(1, 1)[0])
    assert temperature.grad is None


class KeepingTanh(torch.autograd.Function):
    """Keeps a tensor that nothing else needs, past `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.slope = 1 - torch.tanh(x).square()
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.slope


class KeepingBlock(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(KeepingTanh.apply(torch.sin(self.up(x))))


class HookingBlock(ToyBlock):
    """A hook on a tensor of its own reads another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = torch.sin(self.up(x))
        weight = torch.cos(up.detach() + 1)
        if up.requires_grad:
            up.register_hook(lambda gradient: gradient * weight)
        return x + self.down(torch.tanh(up))


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("block", [KeepingBlock, HookingBlock])
def test_what_backward_code_keeps_by_itself_is_computed_again(
    block: type[ToyBlock], device: str, tmp_path: Path
) -> None:
    assert_same_toys(*run_toy(lambda: Toy(lambda _: block()), tmp_path, device=device))


class QuestioningBlock(ToyBlock):
    """Looks at values that its backward does not need, as models in fp16 do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        if torch.isinf(up).any():
            up = torch.clamp(up, -1, 1)
        if torch.isfinite(up).all():
            up = up * 1.5
        return x + self.down(torch.tanh(up))


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_block_that_asks_about_values_gets_the_same_answers_again(
    device: str, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return Toy(lambda _: QuestioningBlock(), depth=6)

    assert_same_toys(*run_toy(make, tmp_path, device=device))


class EitherBlock(ToyBlock):
    """Runs the same operators whichever of two tensors it goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 8)
        self.is_on = False

    def forward(self, x: torch.Tensor, is_other: bool = False) -> torch.Tensor:
        one, other = self.up(x), self.other(x)
        chosen = torch.tanh(other if is_other or self.is_on else one)
        return x + self.down(chosen) + (one.sum() + other.sum()) * 0.01


class TakingTurns(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, number % 2 == 1)
        return x


@pytest.mark.parametrize("kind", [Toy, TakingTurns])
def test_a_block_that_reads_other_tensors_than_when_it_was_traced_is_recomputed(
    kind: type[Toy], tmp_path: Path
) -> None:
    def make() -> nn.Module:
        return kind(lambda _: EitherBlock())

    assert_same_toys(*run_toy(make, tmp_path, change=begin_late))


class WorkBehindBlocks(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.sin(block(x)) * 2
        return x


def test_work_between_blocks_does_not_change_what_is_done_with_their_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitting = []
    fits = Graph.fits

    def fits_and_note(graph: Graph, names: Mapping[int, str]) -> bool:
        fitting.append(fits(graph, names))
        return fitting[-1]

    monkeypatch.setattr(Graph, "fits", fits_and_note)
    assert_same_toys(*run_toy(lambda: WorkBehindBlocks(lambda _: ToyBlock()), tmp_path))
    assert fitting
    assert all(fitting)
