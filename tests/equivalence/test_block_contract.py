"""A block is a function of its arguments, parameters, buffers and torch's generators: what changes
anything else is refused by name, before its step has changed anything."""

import random
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lohan.errors import ConfigError
from support.driven_toys import assert_nothing_left, drive
from support.driving_hooks import StayInPlace
from support.toy_models import Toy, ToyBlock, toy_batches


class Holding(ToyBlock):
    """Has some of everything that could be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.counts = {"calls": 0}
        self.state = types.SimpleNamespace(calls=0, deep={"seen": ([], {})})
        self.source = torch.Generator().manual_seed(3)
        self.dice = random.Random(3)
        self.scale = torch.ones(())
        self.others: list[torch.nn.Module] = []

    def change(self) -> object:
        """What is to be refused."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.change()
        return y


class Appends(Holding):
    def change(self) -> object:
        return self.seen.append(1)


class Counts(Holding):
    def change(self) -> object:
        self.counts["calls"] += 1


class CountsInAnObject(Holding):
    def change(self) -> object:
        self.state.calls += 1


class AppendsDeepDown(Holding):
    def change(self) -> object:
        return self.state.deep["seen"][0].append(1)


class DrawsFromItsOwn(Holding):
    def change(self) -> object:
        return torch.rand(2, generator=self.source)


class ThrowsItsDice(Holding):
    def change(self) -> object:
        return self.dice.random()


class WritesToATensor(Holding):
    def change(self) -> object:
        return self.scale.mul_(2)


class HooksItself(Holding):
    def change(self) -> object:
        return self.up.register_forward_hook(lambda _module, _args, output: output * 1.5)


class PutsAnotherWeight(Holding):
    def change(self) -> object:
        self.up.weight = torch.nn.Parameter(self.up.weight.detach() * 0.5)


class ThrowsPythonsDice(Holding):
    """Nothing would show in a graph: the layer is hardly ever dropped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if random.random() < 1e-9 else super().forward(x)


class DrawsFromNumpy(Holding):
    def change(self) -> object:
        return np.random.rand()


class ChangesTheModel(Holding):
    def change(self) -> object:
        self.others[0].num_calls += 1


class AppendsToTheModels(Holding):
    def change(self) -> object:
        return self.others[0].log.append(1)


class ChangesANeighbour(Holding):
    def change(self) -> object:
        self.others[0].blocks[1].size = 7


class ChangesItsInput(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        x += 1
        return y


class Knowing(Toy):
    """Whose blocks know it."""

    def __init__(self, make_block: Callable[[int], torch.nn.Module]) -> None:
        super().__init__(make_block)
        self.num_calls, self.log = 0, [0]
        for block in self.blocks:
            block.others.append(self)


REFUSED: dict[type[Holding], str] = {
    Appends: "blocks.0.seen",
    Counts: "blocks.0.counts.calls",
    CountsInAnObject: "blocks.0.state.calls",
    AppendsDeepDown: "blocks.0.state",
    DrawsFromItsOwn: "blocks.0.source",
    ThrowsItsDice: "blocks.0.dice",
    WritesToATensor: "blocks.0.scale",
    HooksItself: "blocks.0.up._forward_hooks",
    PutsAnotherWeight: "blocks.0.up.weight",
    ThrowsPythonsDice: "Python's or numpy's random generator",
    DrawsFromNumpy: "Python's or numpy's random generator",
    ChangesTheModel: "the model.num_calls",
    AppendsToTheModels: "the model",
    ChangesANeighbour: "blocks.1.size",
    ChangesItsInput: "an argument",
}


def _refused(model: torch.nn.Module, num_micro_batches: int = 1) -> str:
    driven, hooks, store = drive(model, StayInPlace)
    threads, state = threading.active_count(), torch.get_rng_state()
    with pytest.raises(ConfigError) as refusal:
        driven.step(toy_batches(num_micro_batches))
    assert_nothing_left(driven, hooks, store, threads, state)
    return refusal.value.what


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("block", REFUSED)
def test_a_block_that_changes_more_than_its_buffers_is_refused_by_name(
    block: type[Holding], num_micro_batches: int
) -> None:
    what = _refused(Knowing(lambda _: block()), num_micro_batches)
    assert what == f"block blocks.0 changes {REFUSED[block]}"


@dataclass
class State:
    """What PyTorch does not take apart."""

    count: int = 0


class Given(Toy):
    def __init__(self, change: Callable[[Any], object], given: Callable[[], Any]) -> None:
        class Block(ToyBlock):
            def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
                change(given)
                return super().forward(x)

        super().__init__(lambda _: Block())
        self._given = given

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self._given())
        return x


@pytest.mark.parametrize(
    ("change", "given", "name"),
    [
        (lambda given: given.append(1), list, "an argument"),
        (lambda given: given.update(a=1), dict, "an argument.a"),
        (lambda given: setattr(given, "count", given.count + 1), State, "an argument.count"),
        (lambda given: given.add_(1), lambda: torch.ones(()), "an argument"),
    ],
)
def test_a_block_that_changes_its_arguments_is_refused(
    change: Callable[[Any], object], given: Callable[[], Any], name: str
) -> None:
    assert _refused(Given(change, given)) == f"block blocks.0 changes {name}"


def test_a_forward_that_needs_no_backward_may_do_what_it_likes() -> None:
    model = Knowing(lambda _: Appends())
    driven, _, _ = drive(model)
    driven.evaluate(toy_batches(2))
    assert [block.seen for block in model.blocks] == [[1, 1]] * 3
