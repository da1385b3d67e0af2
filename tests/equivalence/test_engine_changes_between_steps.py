"""What users change between steps: followed to the bit, or refused before anything happens."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lohan.errors import ConfigError, ScheduleError
from lohan.optimizer.torch_optimizer import AdamW
from support.toy_models import Toy, ToyBlock
from support.toy_runs import (
    Change,
    assert_same_toys,
    attach_toy,
    make_toy,
    run_toy,
    toy_optimizer,
    toy_steps,
)


def make() -> Toy:
    return Toy(lambda _: ToyBlock())


def freeze_then_thaw(step: int, model: nn.Module, optimizer: AdamW) -> None:
    for parameter in model.blocks[1].up.parameters():
        parameter.requires_grad_(step not in (1, 2))


def freeze_the_beginning(step: int, model: nn.Module, optimizer: AdamW) -> None:
    for part in (model.enter, model.blocks[0]):
        part.requires_grad_(step < 1)


def change_all_rates(step: int, model: nn.Module, optimizer: AdamW) -> None:
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = torch.tensor(1e-3 * (step + 1) * (number + 1))
        group["weight_decay"], group["betas"] = 0.01 * step, (0.9 - 0.1 * step, 0.99)


def change_clipping(step: int, model: nn.Module, optimizer: AdamW) -> None:
    optimizer.max_grad_norm = [0.01, None, math.inf, 0.02][step]


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize(
    "change", [freeze_then_thaw, freeze_the_beginning, change_all_rates, change_clipping]
)
def test_changes_between_steps_are_followed(change: Change, device: str, tmp_path: Path) -> None:
    assert_same_toys(*run_toy(make, tmp_path, steps=toy_steps(4), change=change, device=device))


def thaw(step: int, model: nn.Module, optimizer: AdamW) -> None:
    model.enter.requires_grad_(True)


def clip(step: int, model: nn.Module, optimizer: AdamW) -> None:
    optimizer.max_grad_norm = 0.5


def clip_to_nothing(step: int, model: nn.Module, optimizer: AdamW) -> None:
    optimizer.max_grad_norm = 0.0


def leave_its_group(step: int, model: nn.Module, optimizer: AdamW) -> None:
    optimizer.param_groups[1]["params"].clear()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (thaw, "enter.weight was frozen when the model was attached"),
        (clip, "max_grad_norm was None when the model was attached and is 0.5 now"),
        (clip_to_nothing, "max_grad_norm is 0.0"),
        (leave_its_group, "is in no group of the optimizer any more"),
    ],
)
def test_changes_that_cannot_be_followed_are_refused_and_can_be_undone(
    change: Change, words: str, tmp_path: Path
) -> None:
    model = make_toy(make)
    model.enter.requires_grad_(False)
    optimizer = toy_optimizer(model, max_grad_norm=None)
    batches = toy_steps(1)[0]
    with attach_toy(model, optimizer, tmp_path) as engine:
        engine.step(batches)
        before = optimizer.max_grad_norm, [list(g["params"]) for g in optimizer.param_groups]
        change(1, model, optimizer)
        with pytest.raises(ConfigError, match=words):
            engine.step(batches)
        optimizer.max_grad_norm = before[0]
        for group, parameters in zip(optimizer.param_groups, before[1], strict=True):
            group["params"][:] = parameters
        model.enter.requires_grad_(False)
        assert engine.step(batches).step == 2
        engine.close(should_delete=True)


def test_a_batch_that_requires_a_gradient_is_refused_before_the_step(tmp_path: Path) -> None:
    model = make_toy(make)
    (batch,) = toy_steps(1, 1)[0]
    with attach_toy(model, toy_optimizer(model), tmp_path) as engine:
        with pytest.raises(
            ConfigError, match=r"shape \(5, 4\) in a micro-batch requires a gradient"
        ):
            engine.step([{"x": batch["x"].clone().requires_grad_()}])
        assert engine.step([batch]).step == 1
        engine.close(should_delete=True)


@pytest.mark.parametrize("what", ["weights", "moments"])
def test_states_of_two_steps_are_never_given_as_one(what: str, tmp_path: Path) -> None:
    model = make_toy(make)
    first, second = toy_steps(2)
    with attach_toy(model, toy_optimizer(model), tmp_path) as engine:
        engine.step(first)
        read = getattr(engine, what)()
        next(read)
        engine.step(second)
        with pytest.raises(ScheduleError, match="step 2 was taken while the states of step 1"):
            next(read)
        assert len(list(getattr(engine, what)())) == len(list(model.parameters()))
        engine.close(should_delete=True)


def test_parameters_that_were_replaced_are_refused_before_the_step(tmp_path: Path) -> None:
    model = make_toy(make)
    optimizer = toy_optimizer(model, max_grad_norm=None)
    batches = toy_steps(1)[0]
    with attach_toy(model, optimizer, tmp_path) as engine:
        before = model.enter
        model.enter = nn.Linear(*reversed(before.weight.shape)).to(torch.bfloat16)
        with pytest.raises(ConfigError, match=r"enter\.weight is another parameter since"):
            engine.step(batches)
        model.enter = before
        assert engine.step(batches).step == 1
        engine.close(should_delete=True)


def test_moments_of_another_optimizer_are_not_taken_without_a_word(tmp_path: Path) -> None:
    model = make_toy(make)
    other = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other.step()
    model.zero_grad()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match=r"moments of .* parameters were given"):
        optimizer.load_state_dict(other.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


def test_parameters_without_a_shape_are_refused(tmp_path: Path) -> None:
    model = make_toy(make)
    model.lazy = nn.LazyLinear(3, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"have no shape yet, lazy\.weight the first"):
        attach_toy(model, AdamW(model.parameters(), lr=1e-3), tmp_path)
