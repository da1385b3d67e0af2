"""Modes of single modules, losses that draw, hooks on parameters: as in memory to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lohan.optimizer.torch_optimizer import AdamW
from support.toy_models import WIDTH, Toy, ToyBlock
from support.toy_runs import (
    Change,
    assert_same_toys,
    attach_toy,
    make_toy,
    run_toy,
    toy_optimizer,
    toy_steps,
)


class DroppingBlock(ToyBlock):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x))


def train_the_blocks_alone(step: int, model: nn.Module, optimizer: AdamW) -> None:
    model.eval()
    model.blocks.train()


def put_one_block_aside(step: int, model: nn.Module, optimizer: AdamW) -> None:
    model.blocks[0].train(step < 1)


def begin_to_drop(step: int, model: nn.Module, optimizer: AdamW) -> None:
    for block in model.blocks:
        block.drop.p = 0.2 * step


@pytest.mark.parametrize("change", [train_the_blocks_alone, put_one_block_aside, begin_to_drop])
def test_random_numbers_follow_the_mode_of_every_module(change: Change, tmp_path: Path) -> None:
    assert_same_toys(
        *run_toy(
            lambda: Toy(lambda _: DroppingBlock()), tmp_path, steps=toy_steps(3), change=change
        )
    )


def quiet_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(batch["x"])[0]


def noisy_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(batch["x"] + torch.randn_like(batch["x"]))[0] * torch.rand(())


def test_a_loss_that_draws_may_follow_one_that_does_not_and_draws_in_evaluation(
    tmp_path: Path,
) -> None:
    model = make_toy(lambda: Toy(lambda _: ToyBlock()))
    twin = make_toy(lambda: Toy(lambda _: ToyBlock()))
    first, second = toy_steps(2)
    with attach_toy(model, toy_optimizer(model), tmp_path) as engine:
        engine.prepare(first)
        for loss_fn in (quiet_loss, noisy_loss):
            for is_training in (True, False):
                model.train(is_training)
                torch.manual_seed(9)
                found = engine.evaluate([*first, *second], loss_fn)
                torch.manual_seed(9)
                twin.train(is_training)
                with torch.no_grad():
                    expected = [float(loss_fn(twin, batch)) for batch in (*first, *second)]
                assert found == expected
        model.train()
        engine.step(first, quiet_loss)
        assert engine.step(first, noisy_loss).step == 2


class TiedToy(Toy):
    """One table before and after the blocks."""

    def __init__(self) -> None:
        super().__init__(lambda _: ToyBlock())
        self.table = nn.Parameter(torch.randn(4, WIDTH) * 0.3)
        del self.enter, self.leave

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((self.body(x @ self.table) @ self.table.t()).square().mean(),)


def bound_gradients(step: int, model: nn.Module, optimizer: AdamW) -> None:
    if step == 0:
        model.table.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        model.blocks[1].up.weight.register_hook(lambda gradient: gradient * 2)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_hooks_on_tied_parameters_see_whole_gradients(device: str, tmp_path: Path) -> None:
    assert_same_toys(*run_toy(TiedToy, tmp_path, change=bound_gradients, device=device))


class AskingBlock(ToyBlock):
    """Notes where tensors are made that nobody says a device for."""

    place = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.place = torch.empty(0).device.type
        return super().forward(x)


class AskingToy(Toy):
    def __init__(self) -> None:
        self.places: list[str] = []
        super().__init__(lambda _: AskingBlock())

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.places.append(torch.empty(0).device.type)
        return super().body(x)


def test_defaults_of_the_process_reach_the_model_and_nothing_else(tmp_path: Path) -> None:
    model = make_toy(AskingToy)
    with attach_toy(model, toy_optimizer(model), tmp_path) as engine:
        engine.prepare(toy_steps(1)[0])
        batches = toy_steps(1)[0]
        model.places.clear()
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        try:
            engine.step(batches)
            masters = dict(engine.weights())
            moments = [moment for _, *both in engine.moments() for moment in both]
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
    assert {*model.places, *(block.place for block in model.blocks)} == {"meta"}
    for tensor in (*masters.values(), *moments):
        assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu")


def test_it_is_said_that_fp32_parameters_of_a_bf16_model_compute_in_bf16(tmp_path: Path) -> None:
    model = make_toy(lambda: Toy(lambda _: ToyBlock()))
    model.leave.float()
    told: list[str] = []
    with attach_toy(model, toy_optimizer(model), tmp_path, progress=told.append):
        pass
    assert "2 parameters are fp32; they compute in bf16 here, as the others do" in told
