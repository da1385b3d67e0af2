"""Models that draw from Python's `random` and `numpy.random`: the numbers of a plain loop."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lohan.drive import DrawsUnknown
from lohan.drive.surroundings.host_randomness import HostState
from lohan.vocabulary import Choice
from support.engine_faults import assert_states, states_of
from support.engine_runs import EngineCase, optimizer_for
from support.odd_runs import plain, start, states_in_memory


class Block(torch.nn.Module):
    """Drops out by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.up(x)))


class DrawingModel(torch.nn.Module):
    """Between its blocks it takes chances by `random` and makes noise by numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.leave = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.enter(x) * random.random()
        for block in self.blocks:
            noise, scale = float(np.random.rand()), random.uniform(0.5, 1.5)
            x = block(x * 2 if random.random() < 0.3 else x) * scale * noise
        noise = np.random.rand(3).sum()
        return {"loss": self.leave(x).square().mean() * noise}


def _batches(num_steps: int, num_micro_batches: int) -> list[list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [
            {"x": torch.randn(2, 3, 4, generator=generator).to(torch.bfloat16)}
            for _ in range(num_micro_batches)
        ]
        for _ in range(num_steps)
    ]


def _seed() -> None:
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("choice", [Choice.RECOMPUTE, Choice.SWAP_TO_RAM])
def test_numbers_of_python_and_numpy_are_those_of_a_plain_loop(
    choice: Choice, num_micro_batches: int, tmp_path: Path
) -> None:
    case = EngineCase(residents=False, choice=choice)
    torch.manual_seed(3)
    model = DrawingModel().to(torch.bfloat16)
    twin, steps = copy.deepcopy(model), _batches(4, num_micro_batches)
    # Attaching traces the model, which must not move the generators either.
    _seed()
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        losses = [list(engine.step(batches).losses) for batches in steps]
        after = HostState.now()
        _seed()
        expected = plain(case, engine, twin, steps)
        assert losses == expected.losses
        assert after == HostState.now()
        assert_states(states_of(engine), states_in_memory(expected))


class DrawingNormal(DrawingModel):
    """Numbers that come in pairs, of which one is kept: not counted in words."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.enter(x) * random.gauss(0.0, 1.0)
        for block in self.blocks:
            x = block(x) * float(np.random.normal())
        return {"loss": self.leave(x).square().mean()}


def test_an_amount_that_cannot_be_counted_is_refused_unless_micro_batches_come_singly(
    tmp_path: Path,
) -> None:
    case = EngineCase(residents=False, choice=Choice.RECOMPUTE)
    torch.manual_seed(3)
    model = DrawingNormal().to(torch.bfloat16)
    twin, steps = copy.deepcopy(model), _batches(3, 1)
    _seed()
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        losses = [list(engine.step(batches).losses) for batches in steps]
        _seed()
        assert losses == plain(case, engine, twin, steps).losses
        with pytest.raises(DrawsUnknown, match="drew random numbers in an amount"):
            engine.step(_batches(1, 2)[0])
