"""Blocks that keep or are given more than tensors and numbers: right if they are run again, too, or
refused with a reason."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from lohan.errors import ConfigError, ScheduleError
from lohan.vocabulary import Choice
from support.engine_faults import assert_states, states_of
from support.engine_runs import EngineCase, build, optimizer_for
from support.odd_runs import plain, start, states_in_memory
from support.tiny_models import TINY_MODELS
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


@dataclass
class State:
    """What PyTorch does not take apart."""

    mean: torch.Tensor | None = None


class ReadingBlock(ToyBlock):
    def forward(self, x: torch.Tensor, state: State) -> torch.Tensor:
        return super().forward(x) * state.mean


class ChangedLater(Toy):
    """Gives the next block the same object with something else in it."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        state = State()
        for block in self.blocks:
            state.mean = torch.sigmoid(x.detach())
            x = block(x, state)
        return x


class NewEachTime(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, State(mean=torch.sigmoid(x.detach())))
        return x


def test_an_object_that_changes_later_is_no_argument_of_a_block(tmp_path: Path) -> None:
    model = make_toy(lambda: ChangedLater(lambda _: ReadingBlock()))
    with (
        attach_toy(model, toy_optimizer(model), tmp_path, choice=Choice.RECOMPUTE) as engine,
        pytest.raises(ConfigError, match=r"an object among the arguments of block blocks\.0"),
    ):
        engine.step(toy_steps(1)[0])


@pytest.mark.parametrize("choice", CHOICES)
def test_an_object_that_stays_as_it_is_may_be_an_argument(choice: Choice, tmp_path: Path) -> None:
    assert_same_toys(
        *run_toy(lambda: NewEachTime(lambda _: ReadingBlock()), tmp_path, choice=choice)
    )


def test_a_cache_that_a_call_asks_for_is_left_out(tmp_path: Path) -> None:
    """Blocks that are run again would fill it twice."""
    case = EngineCase(choice=Choice.RECOMPUTE, residents=False, num_micro_batches=2)
    model = build(case)
    twin = copy.deepcopy(model)
    batches = [TINY_MODELS["llama"].batch(seed, case.dtype) for seed in range(4)]
    steps = [[{**one, "use_cache": True} for one in batches[first : first + 2]] for first in (0, 2)]
    with start(case, model, optimizer_for(case, model), tmp_path, steps[0][0]) as engine:
        losses = [list(engine.step(one).losses) for one in steps]
        expected = plain(case, engine, twin, steps)
        assert losses == expected.losses
        assert_states(states_of(engine), states_in_memory(expected))


class SometimesNothing(ToyBlock):
    """Leaves itself out, as stochastic depth does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(()) < 0.5 else super().forward(x)


@pytest.mark.parametrize("choice", [*CHOICES, Choice.SWAP_TO_SSD])
def test_a_block_may_hand_its_input_through(choice: Choice, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return Toy(lambda _: SometimesNothing())

    assert_same_toys(*run_toy(make, tmp_path, choice=choice, device="emulated"))


class ClampsItsData(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class ClampsOutside(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.leave.weight.data.clamp_(-0.1, 0.1)
        return super().body(x)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Toy(lambda _: ClampsItsData()), r"blocks\.0\.up\.weight"),
        (lambda: ClampsOutside(lambda _: ToyBlock()), "leave.weight"),
    ],
)
def test_weights_that_a_forward_changes_behind_autograd_are_refused(
    make: Callable[[], nn.Module], name: str, tmp_path: Path
) -> None:
    model = make_toy(make)
    with (
        attach_toy(model, toy_optimizer(model), tmp_path) as engine,
        pytest.raises((ConfigError, ScheduleError), match=name),
    ):
        engine.step(toy_steps(1, 1)[0])


class PutsOtherData(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data = self.up.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class PutsAnother(ToyBlock):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight = nn.Parameter(self.up.weight.detach().clamp(-0.1, 0.1))
        return super().forward(x)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("block", [PutsOtherData, PutsAnother])
def test_a_forward_that_puts_another_weight_in_place_is_refused(
    block: type[ToyBlock], num_micro_batches: int, tmp_path: Path
) -> None:
    model = make_toy(lambda: Toy(lambda _: block()))
    with (
        attach_toy(model, toy_optimizer(model), tmp_path) as engine,
        pytest.raises(ConfigError, match=r"blocks\.0\.up\.weight|nor a parameter of its own"),
    ):
        engine.step(toy_steps(1, num_micro_batches)[0])


class KeepsItsWeight(ToyBlock):
    def __init__(self) -> None:
        super().__init__()
        self.turned = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turned = self.up.weight.detach().t()
        return x + self.down(torch.tanh(x @ self.turned))


class ReadsKeptWeights(Toy):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        (loss,) = super().forward(x)
        return (loss + sum(block.turned.square().mean() for block in self.blocks),)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_weight_in_an_attribute_is_read_by_its_block_alone(
    choice: Choice, tmp_path: Path
) -> None:
    assert_same_toys(*run_toy(lambda: Toy(lambda _: KeepsItsWeight()), tmp_path, choice=choice))
    model = make_toy(lambda: ReadsKeptWeights(lambda _: KeepsItsWeight()))
    with (
        attach_toy(model, toy_optimizer(model), tmp_path, choice=choice) as engine,
        pytest.raises(ScheduleError, match=r"weights of blocks\.0 .* are offloaded"),
    ):
        engine.step(toy_steps(1)[0])


def test_hooks_on_gradients_that_are_added_up_elsewhere_are_refused(tmp_path: Path) -> None:
    model = make_toy(lambda: Toy(lambda _: ToyBlock()))
    model.enter.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with (
        attach_toy(model, toy_optimizer(model), tmp_path) as engine,
        pytest.raises(ConfigError, match=r"enter\.weight has a hook that runs after"),
    ):
        engine.step(toy_steps(1)[0])
