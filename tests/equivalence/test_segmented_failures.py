"""A step that fails surfaces its error and leaves nothing behind; draws that were not known."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lohan.drive import (
    DrawsUnknown,
    Phase,
)
from lohan.verify.plain_loop import losses_and_gradients
from lohan.vocabulary import BlockId
from support.driven_toys import assert_nothing_left, drive
from support.driving_hooks import assert_same_gradients, twin
from support.toy_models import TOYS, DropoutBlock, Toy, ToyBlock, toy_batches


class Boom(Exception):
    pass


class FailingBlock(ToyBlock):
    """Fails at its n-th call."""

    def __init__(self) -> None:
        super().__init__()
        # A block may not change what it holds; an iterator moves unseen.
        self.fails: Iterator[bool] = iter(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if next(self.fails, False):
            raise Boom
        return super().forward(x)


class FailingToy(Toy):
    where = ""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if self.where == "start" and self.count():
            raise Boom
        loss = super().forward(x)
        if self.where == "end" and self.count():
            raise Boom
        return loss

    calls = 0

    def count(self) -> bool:
        self.calls += 1
        return self.calls == 2


@pytest.mark.parametrize("call", range(1, 7))
@pytest.mark.parametrize("block", range(3))
def test_an_error_in_any_block_call_surfaces_and_the_model_stays_usable(
    block: int, call: int
) -> None:
    """Calls 1 to 3 are the forwards of three micro-batches, the next three the re-runs. Before the
    first of these the block is captured, which is a call too: its error is none of the step's."""
    model = Toy(lambda _: FailingBlock())
    plain = twin(model)
    driven, hooks, store = drive(model)
    threads, state = threading.active_count(), torch.get_rng_state()
    num_captures = int(call > 3)
    model.blocks[block].fails = iter([False] * (call - 1 + num_captures) + [True])
    with pytest.raises(Boom) as raised:
        driven.step(toy_batches(3))
    assert f"blocks.{block}" in raised.value.__notes__[0]
    assert f"micro-batch {(call - 1) % 3}" in raised.value.__notes__[0]
    assert_nothing_left(driven, hooks, store, threads, state)

    _, expected = losses_and_gradients(plain, toy_batches(3))
    driven.step(toy_batches(3))
    assert_same_gradients(hooks.gradients, expected)


@pytest.mark.parametrize("where", ["start", "end"])
def test_an_error_outside_the_blocks_surfaces(where: str) -> None:
    model = FailingToy(lambda _: ToyBlock())
    driven, hooks, store = drive(model)
    threads, state = threading.active_count(), torch.get_rng_state()
    model.where = where
    with pytest.raises(Boom) as raised:
        driven.step(toy_batches(3))
    assert "micro-batch 1" in raised.value.__notes__[0]
    assert_nothing_left(driven, hooks, store, threads, state)
    driven.step(toy_batches(3))


@pytest.mark.parametrize("phase", Phase)
def test_an_error_of_the_caller_s_hooks_surfaces(phase: Phase) -> None:
    driven, hooks, store = drive(Toy(lambda _: ToyBlock()))
    threads, state = threading.active_count(), torch.get_rng_state()
    after = hooks.after

    def failing(segment: BlockId, now: Phase, gradients: Any) -> None:
        if now is phase:
            raise Boom
        after(segment, now, gradients)

    hooks.after = failing
    with pytest.raises(Boom):
        driven.step(toy_batches(2))
    assert_nothing_left(driven, hooks, store, threads, state)


def test_an_interrupt_stops_every_thread() -> None:
    model = FailingToy(lambda _: ToyBlock())

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if batch is batches[1]:
            raise KeyboardInterrupt
        return model(**batch)[0]

    driven, hooks, store = drive(model)
    threads, state = threading.active_count(), torch.get_rng_state()
    batches = toy_batches(3)
    with pytest.raises(KeyboardInterrupt):
        driven.step(batches, loss_fn)
    assert_nothing_left(driven, hooks, store, threads, state)


def test_a_failed_step_keeps_no_activation_alive() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watched(ToyBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.up(x))
            alive.append(weakref.ref(h))
            if len(alive) == 5:
                raise Boom
            return self.down(h)

    driven, _, _ = drive(Toy(lambda _: Watched()))
    with pytest.raises(Boom):
        driven.step(toy_batches(3))
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_draws_that_are_not_known_are_reported_before_any_gradient_leaves() -> None:
    model = TOYS["random numbers"]().train()
    driven, hooks, store = drive(model)
    threads, state = threading.active_count(), torch.get_rng_state()
    with pytest.raises(DrawsUnknown, match="micro-batch 0"):
        driven.step(toy_batches(2))
    assert not hooks.gradients
    assert_nothing_left(driven, hooks, store, threads, state)
    driven.learn_draws(toy_batches(1)[0])
    driven.step(toy_batches(2))  # known now
    with pytest.raises(DrawsUnknown):
        driven.step(toy_batches(2, rows=9))  # another shape is not
    hooks.abandon()
    driven.step(toy_batches(1, rows=11))  # of the last micro-batch it need not be known


def test_a_wrong_prediction_of_draws_is_noticed() -> None:
    class Moody(DropoutBlock):
        mood = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (torch.rand(2).sum() if self.mood else 0)

    model = Toy(lambda _: Moody()).train()
    plain = twin(model)
    driven, hooks, _ = drive(model)
    driven.learn_draws(toy_batches(1)[0])
    driven.step(toy_batches(3))
    hooks.gradients.clear()
    model.blocks[2].mood = plain.blocks[2].mood = 1
    with pytest.raises(DrawsUnknown):
        driven.step(toy_batches(3))
    hooks.abandon()
    state = torch.get_rng_state()
    driven.learn_draws(toy_batches(1)[0])
    driven.step(toy_batches(3))
    torch.set_rng_state(state)
    assert_same_gradients(hooks.gradients, losses_and_gradients(plain, toy_batches(3))[1])


def test_draws_that_depend_on_values_are_never_predicted() -> None:
    class Samples(ToyBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = torch.multinomial(torch.softmax(x.detach(), -1), 1)
            return super().forward(x) + chosen

    model = Toy(lambda _: Samples())
    driven, _, _ = drive(model)
    driven.learn_draws(toy_batches(1)[0])
    with pytest.raises(DrawsUnknown):
        driven.step(toy_batches(2))
