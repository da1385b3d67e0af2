"""Buffers that training changes (running statistics, counters) end as a plain loop leaves them."""

import copy
from pathlib import Path

import pytest
import torch

from lohan.vocabulary import Choice
from support.engine_faults import assert_states, states_of
from support.engine_runs import EngineCase, optimizer_for
from support.odd_runs import plain, start, states_in_memory

DEVICES = ["cpu", "emulated"]


class CountingBlock(torch.nn.Module):
    """Keeps a running mean of what passes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)) * 0.1)
            # Another tensor each time, not another value of the same.
            self.num_rows = self.num_rows + len(x)
        return x + self.dropout(torch.tanh(self.up(x - self.mean.to(x.dtype))))


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(CountingBlock() for _ in range(3))
        self.leave = torch.nn.Linear(8, 1)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.full((), -9.0))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.num_calls += 1
            self.largest = torch.maximum(self.largest, x.detach().amax())
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": self.leave(x).square().mean()}


@pytest.mark.parametrize("device", DEVICES)
def test_running_statistics_are_those_of_plain_training(device: str, tmp_path: Path) -> None:
    """Also in the first step, before which a forward counts the random numbers it draws."""
    case = EngineCase(device=device, residents=False, choice=Choice.RECOMPUTE)
    torch.manual_seed(3)
    model = Counting().to(torch.bfloat16)
    for block in model.blocks:
        block.mean = block.mean.float()
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    steps = [
        [
            {"x": torch.randn(num_rows, 3, 4, generator=generator).to(torch.bfloat16)}
            for num_rows in (2, 3, 2)
        ]
        for _ in range(3)
    ]
    torch.manual_seed(11)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        for batches in steps:
            engine.step(batches)
        assert int(model.num_calls) == 9
        torch.manual_seed(11)
        expected = plain(case, engine, twin, steps)
        assert_states(states_of(engine), states_in_memory(expected))
        for (name, own), other in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(own, other), name
