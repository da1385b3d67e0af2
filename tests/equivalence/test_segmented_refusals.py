"""What cannot be driven block by block is refused with a reason."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lohan.drive import SegmentedModel
from lohan.errors import ConfigError, LohanError, ScheduleError
from support.driven_toys import assert_nothing_left, drive
from support.driving_hooks import (
    ComeAndGo,
    StayInPlace,
)
from support.keep_store import KeepStore
from support.mapped_segments import map_segments
from support.toy_models import Toy, ToyBlock, toy_batches


class RepeatsBlock(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](super().body(x))


class ChangesInputAfter(Toy):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x)
        y = self.blocks[1](self.blocks[0](x))
        y2 = self.blocks[2](y)
        y += 1
        return y2 + y


class Smuggles(Toy):
    """Hands a tensor to its blocks behind their arguments."""

    class Block(ToyBlock):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.smuggled

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.smuggled = x.detach().requires_grad_() if self.as_leaf else x * 2
            x = block(x)
        return x

    as_leaf = False


class SmugglesLeaf(Smuggles):
    as_leaf = True


class TiedAround(Toy):
    """A tied parameter, and a tensor made from it that goes around the blocks."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.enter(x)
        y = self.body(x) + x
        return ((y @ self.enter.weight).square().mean(),)


class UsesThreads(Toy):
    """Calls its blocks from a thread of its own."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().body, x).result()


class Detached(Toy):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().forward(x)[0].detach(),)


class NoLoss(Toy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.body(self.enter(x)))


REFUSED: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "repeats a block": (
        lambda: RepeatsBlock(lambda _: ToyBlock()),
        "called block blocks.2 after blocks.2",
    ),
    "input changed later": (
        lambda: ChangesInputAfter(lambda _: ToyBlock()),
        "was changed in place",
    ),
    "smuggles a tensor": (lambda: Smuggles(lambda _: Smuggles.Block()), "neither an argument"),
    "smuggles a leaf": (lambda: SmugglesLeaf(lambda _: Smuggles.Block()), "neither an argument"),
    "threads of its own": (
        lambda: UsesThreads(lambda _: ToyBlock()),
        "outside the model's forward",
    ),
    "detached loss": (lambda: Detached(lambda _: ToyBlock()), "any trainable parameter"),
    "no loss": (lambda: NoLoss(lambda _: ToyBlock()), "not one number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_driven_is_refused_with_a_reason(name: str) -> None:
    make, message = REFUSED[name]
    driven, hooks, store = drive(make(), StayInPlace)
    threads, state = threading.active_count(), torch.get_rng_state()
    with pytest.raises(ConfigError, match=message):
        driven.step(toy_batches(2))
    assert_nothing_left(driven, hooks, store, threads, state)


def test_a_tied_parameter_whose_tensor_goes_around_the_blocks_is_refused() -> None:
    model = TiedAround(lambda _: ToyBlock())
    enter = ["enter.weight", "enter.bias", "leave.weight", "leave.bias"]
    segments = map_segments(model, rest_uses=[enter, ["enter.weight"]])
    sets = segments.parameter_sets(model)
    driven = SegmentedModel(
        model, segments, sets=sets, hooks=ComeAndGo(segments, sets), store=KeepStore()
    )
    with pytest.raises(ConfigError, match="used before and after the blocks"):
        driven.step(toy_batches(2))


def test_weights_that_are_away_are_never_used() -> None:
    model = Toy(lambda _: ToyBlock())
    names = [name for name, _ in model.named_parameters() if not name.startswith("blocks")]
    segments = map_segments(model, rest_uses=[[], names])
    sets = segments.parameter_sets(model)
    driven = SegmentedModel(
        model, segments, sets=sets, hooks=ComeAndGo(segments, sets), store=KeepStore()
    )
    with pytest.raises(ScheduleError, match="weights of head"):
        driven.step(toy_batches(2))


def test_gradients_of_a_segment_that_has_left_are_refused() -> None:
    model = Toy(lambda _: ToyBlock())
    names = [name for name, _ in model.named_parameters() if not name.startswith("blocks")]
    segments = map_segments(model, rest_uses=[[], names])
    sets = segments.parameter_sets(model)
    driven = SegmentedModel(
        model, segments, sets=sets, hooks=StayInPlace(segments, sets), store=KeepStore()
    )
    with pytest.raises(ScheduleError, match="belongs to a later segment"):
        driven.step(toy_batches(2))


def test_hooks_that_do_not_bring_the_weights_are_told() -> None:
    driven, hooks, _ = drive(Toy(lambda _: ToyBlock()))
    hooks.before = lambda segment, phase: None
    with pytest.raises(ScheduleError, match="not in place"):
        driven.step(toy_batches(1))


def test_gradients_that_were_there_before_are_refused() -> None:
    driven, _, _ = drive(Toy(lambda _: ToyBlock()))
    driven.model.leave.bias.grad = torch.zeros(2)
    with pytest.raises(ConfigError, match="has a gradient before the step"):
        driven.step(toy_batches(1))


def test_a_step_without_micro_batches_is_refused() -> None:
    driven, _, _ = drive(Toy(lambda _: ToyBlock()))
    with pytest.raises(ConfigError, match="no micro-batch"):
        driven.step([])


def test_a_batch_that_is_no_mapping_needs_a_loss_function() -> None:
    driven, _, _ = drive(Toy(lambda _: ToyBlock()))
    with pytest.raises(ConfigError, match="loss_fn"):
        driven.step([torch.zeros(2, 4)])


def test_sparse_gradients_are_refused() -> None:
    class Sparse(Toy):
        def __init__(self) -> None:
            super().__init__(lambda _: ToyBlock())
            self.enter = torch.nn.Embedding(5, 6, sparse=True)

    driven, _, _ = drive(Sparse())
    with pytest.raises(LohanError, match="is sparse"):
        driven.step([{"x": torch.tensor([1, 2])}])


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no repeated blocks"):
        map_segments(torch.nn.ReLU())
