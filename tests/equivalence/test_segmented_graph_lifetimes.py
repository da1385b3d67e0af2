"""Graphs that are kept for a backward are gone after it, and after a step that fails."""

import gc
import weakref
from typing import Any

import pytest
import torch

from lohan.verify.plain_loop import losses_and_gradients
from support.block_backwards import BlockBackwards
from support.driven_toys import check_kept, drive_kept
from support.driving_hooks import assert_same_gradients, same_bits, twin
from support.toy_models import Toy, ToyBlock, toy_batches


class UnusedOutput(ToyBlock):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), torch.tanh(self.up(x)).exp()


class IgnoresOutputs(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


class Watched(ToyBlock):
    def __init__(self, refs: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self.refs = refs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))  # saved as an output and as an input
        self.refs.append(weakref.ref(hidden.untyped_storage()))
        unused = hidden.exp()  # saved, and no gradient comes
        return x + self.down(hidden) + unused.detach().sum() * 0


def alive(refs: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(ref() is not None for ref in refs)


def test_graphs_of_a_step_are_gone_after_it_without_the_collector(
    counts: BlockBackwards,
) -> None:
    check_kept(IgnoresOutputs(lambda _: UnusedOutput()))
    refs: list[weakref.ref[torch.Tensor]] = []
    step, _, _ = drive_kept(Toy(lambda _: Watched(refs)))
    gc.collect()
    gc.disable()
    try:
        step(toy_batches(3))
        assert len(refs) == 3 * 3
        assert alive(refs) == 0
    finally:
        gc.enable()
    assert counts.num_again == 0


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("no backward")


class FailingToy(Toy):
    fails = True

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.fails and index == 1:
                x = FailsBackward.apply(x)
        return x


def test_graphs_of_a_step_that_fails_are_dropped(counts: BlockBackwards) -> None:
    """After the failure, not when the collector comes; and the next step is as ever."""
    refs: list[weakref.ref[torch.Tensor]] = []
    torch.manual_seed(2)
    model = FailingToy(lambda _: Watched(refs))
    plain = twin(model)
    plain.fails = False
    step, hooks, store = drive_kept(model)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no backward"):
            step(toy_batches(3))
        assert counts.num_kept == 1
        assert alive(refs) == 0
    finally:
        gc.enable()
    assert len(store) == 0
    hooks.abandon()
    model.fails = False
    losses = step(toy_batches(3))
    expected_losses, expected = losses_and_gradients(plain, toy_batches(3))
    assert all(map(same_bits, losses, expected_losses))
    assert_same_gradients(hooks.gradients, expected)
