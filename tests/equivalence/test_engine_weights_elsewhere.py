"""Weights that are used outside their own block, or are not what a block computes with."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

from lohan.errors import ScheduleError
from lohan.vocabulary import Choice
from support.engine_faults import assert_states, states_of
from support.engine_runs import EngineCase, optimizer_for
from support.odd_runs import plain, start, states_in_memory

WIDTH = 8


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Plain(torch.nn.Module):
    def __init__(self, block: Callable[[], torch.nn.Module] = Block) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(4, WIDTH)
        self.blocks = torch.nn.ModuleList(block() for _ in range(3))
        self.leave = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": self.leave(x).square().mean()}


class GatesBetween(Plain):
    """Parameters of no block, one used behind each, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(WIDTH)) for _ in range(3))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x, loss = self.enter(x), 0.0
        for block, gate, head in zip(self.blocks, self.gates, self.heads, strict=True):
            x = block(x) * gate
            loss = loss + head(x).square().mean()
        return {"loss": loss + self.leave(x).square().mean()}


class Backwards(Plain):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.enter(x)
        for block in reversed(self.blocks):
            x = block(x)
        return {"loss": self.leave(x).square().mean()}


class HeadReadsBlock(Plain):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        y = torch.nn.functional.linear(x, self.blocks[1].up.weight[:1])
        return {"loss": (self.leave(x) + y).square().mean()}


class EmbeddingReadsBlock(Plain):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.enter(x) + self.blocks[1].up.weight[0]
        for block in self.blocks:
            x = block(x)
        return {"loss": self.leave(x).square().mean()}


class Symmetric(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def weight_normed() -> torch.nn.Module:
    block = Block()
    parametrizations.weight_norm(block.up)
    return block


def spectral_normed() -> torch.nn.Module:
    """Its power iteration keeps vectors in buffers, which every forward changes."""
    block = Block()
    parametrizations.spectral_norm(block.up)
    return block


def parametrized() -> torch.nn.Module:
    block = Block()
    block.up = torch.nn.Linear(WIDTH, WIDTH)
    block.down = torch.nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(block.up, "weight", Symmetric())
    return block


def with_penalty(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)["loss"]
    return loss + 1e-3 * sum(one.float().square().sum() for one in model.parameters())


def _batches() -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [{"x": torch.randn(2, 3, 4, generator=generator).to(torch.bfloat16)} for _ in range(2)]
        for _ in range(3)
    ]


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gates and heads between blocks": GatesBetween,
    "blocks from last to first": Backwards,
    "a head that reads a block": HeadReadsBlock,
    "an embedding that reads a block": EmbeddingReadsBlock,
    "weight norm": lambda: Plain(weight_normed),
    "spectral norm": lambda: Plain(spectral_normed),
    "parametrized": lambda: Plain(parametrized),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_used_elsewhere_are_trained_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    choice = Choice.SWAP_TO_RAM if "norm" in name else Choice.RECOMPUTE
    case = EngineCase(residents=False, choice=choice)
    torch.manual_seed(3)
    model = MODELS[name]().to(torch.bfloat16)
    torch.manual_seed(3)
    twin, steps = MODELS[name]().to(torch.bfloat16), _batches()
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        losses = [list(engine.step(batches).losses) for batches in steps]
        expected = plain(case, engine, twin, steps)
        assert losses == expected.losses
        assert_states(states_of(engine), states_in_memory(expected))


def test_a_penalty_on_all_weights_is_followed_if_the_loss_was_there_at_attach(
    tmp_path: Path,
) -> None:
    case = EngineCase(residents=False, choice=Choice.RECOMPUTE)
    torch.manual_seed(3)
    model, steps = Plain().to(torch.bfloat16), _batches()
    twin = copy.deepcopy(model)
    optimizer = optimizer_for(case, model)
    with start(case, model, optimizer, tmp_path, steps[0][0], loss_fn=with_penalty) as engine:
        losses = [list(engine.step(batches).losses) for batches in steps]
        expected = plain(case, engine, twin, steps, loss_fn=with_penalty)
        assert losses == expected.losses
        assert_states(states_of(engine), states_in_memory(expected))


def test_a_penalty_that_comes_later_is_refused_with_the_name_of_the_weight(tmp_path: Path) -> None:
    case = EngineCase(residents=False, choice=Choice.RECOMPUTE)
    model, steps = Plain().to(torch.bfloat16), _batches()
    with (
        start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine,
        pytest.raises(
            ScheduleError, match=r"enter\.weight.*are offloaded.*give a loss .* `attach`"
        ),
    ):
        engine.step(steps[0], with_penalty)
