"""What a model keeps in attributes during a forward, with several micro-batches side by side."""

import copy
from pathlib import Path

import pytest
import torch

from lohan.errors import ConfigError
from lohan.vocabulary import Choice
from support.engine_faults import assert_states, states_of
from support.engine_runs import EngineCase, optimizer_for
from support.odd_runs import plain, start, states_in_memory


class Keeping(torch.nn.Module):
    """Is given a scale in an attribute, and leaves the size of its input in another."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8)
        self.size = self.scale = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = x.detach().square().mean()
        return x + torch.tanh(self.up(x)) * self.scale


class KeepingModel(torch.nn.Module):
    def __init__(self, block: type[torch.nn.Module] = Keeping) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(block() for _ in range(3))
        self.leave = torch.nn.Linear(8, 1)
        self.first = torch.zeros(())
        self.num_forwards = 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.first = x.mean()
        self.sums: list[torch.Tensor] = []
        for block in self.blocks:
            block.scale = x.detach().amax()
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
            self.sums.append(x.float().square().mean())
        loss = self.leave(x).square().mean() * (1 + self.first)
        self.num_forwards += 1
        return {"loss": loss + 0.1 * sum(self.sums) + sum(block.size for block in self.blocks)}


def _batches() -> list[list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [{"x": torch.randn(2, 3, 4, generator=generator).to(torch.bfloat16)} for _ in range(3)]
        for _ in range(3)
    ]


def test_every_micro_batch_finds_what_it_left_in_attributes(tmp_path: Path) -> None:
    case = EngineCase(residents=False, choice=Choice.RECOMPUTE)
    torch.manual_seed(3)
    model, steps = KeepingModel().to(torch.bfloat16), _batches()
    twin = copy.deepcopy(model)
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        losses = [list(engine.step(batches).losses) for batches in steps]
        expected = plain(case, engine, twin, steps)
        assert losses == expected.losses
        assert_states(states_of(engine), states_in_memory(expected))
    # And ends as the last one left it.
    assert torch.equal(model.first, twin.first)
    assert model.num_forwards == 9
    for own, other in zip(model.blocks, twin.blocks, strict=True):
        assert torch.equal(own.size, other.size)
        assert torch.equal(own.scale, other.scale)


class Carrying(Keeping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.size = self.up(x).square().mean()
        return y


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_loss_that_a_block_leaves_in_an_attribute_is_refused(
    num_micro_batches: int, tmp_path: Path
) -> None:
    case = EngineCase(residents=False, choice=Choice.RECOMPUTE)
    model, steps = KeepingModel(Carrying).to(torch.bfloat16), _batches()
    with (
        start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine,
        pytest.raises(ConfigError, match="that a block made and did not return"),
    ):
        engine.step(steps[0][:num_micro_batches])


class ReadBefore(KeepingModel):
    """A schedule of its own: read before the blocks, counted after them."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x * (1 + 0.1 * self.num_forwards))


class CountedTwice(KeepingModel):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_forwards += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [ReadBefore, CountedTwice])
def test_a_number_counted_too_late_for_the_next_micro_batch_is_refused(
    kind: type[KeepingModel], tmp_path: Path
) -> None:
    case = EngineCase(residents=False, choice=Choice.RECOMPUTE)
    torch.manual_seed(3)
    model, steps = kind().to(torch.bfloat16), _batches()
    twin = copy.deepcopy(model)
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
    with start(case, model, optimizer_for(case, model), tmp_path / "one", steps[0][0]) as engine:
        # One that is alone finds its own.
        one = [[batches[0]] for batches in steps]
        losses = [list(engine.step(batches).losses) for batches in one]
        assert losses == plain(case, engine, twin, one).losses
    model = kind().to(torch.bfloat16)
    with (
        start(case, model, optimizer_for(case, model), tmp_path / "two", steps[0][0]) as engine,
        pytest.raises(ConfigError, match=f"{kind.__name__} changes its num_forwards from"),
    ):
        engine.step(steps[0][:2])
