"""Whatever runs, all that a model holds ends as it was; its copy has nothing in common with it."""

import functools
import random
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.model.tracing import kept_contents
from lohan.model.tracing.kept_contents import left_as_found
from lohan.model.tracing.object_copies import ObjectCopies

Pair = namedtuple("Pair", ("first", "second"))


class Slotted:
    __slots__ = ("empty", "values")

    def __init__(self) -> None:
        self.values: list[int] = [1]


class Frozen(OrderedDict[str, Any]):
    """Refuses to be changed, as configurations do."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("frozen")


def frozen() -> Frozen:
    made = Frozen()
    OrderedDict.__setitem__(made, "sizes", [1, 2])
    return made


def counter() -> Any:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.handle = self.inner.register_forward_hook(lambda *_: None)
        self.pair = Pair([1], {"a": deque([1], maxlen=3)})
        self.groups: Any = defaultdict(list, {"x": [1]})
        self.slotted, self.frozen, self.count = Slotted(), frozen(), counter()
        self.table = torch.ones(3)
        self.array = np.ones(3)
        self.dice, self.source = random.Random(3), torch.Generator().manual_seed(3)
        self.numbers, self.old_numbers = np.random.default_rng(3), np.random.RandomState(3)
        self.method = self.pair.first.append
        self.bound = functools.partial(self.change_list, 3)

    def change_list(self, value: int) -> None:
        self.pair.first.append(value)


def change(model: Any) -> None:
    """Everything there is."""
    model.handle.remove()
    model.inner.register_forward_pre_hook(lambda *_: None)
    model.inner.is_new = True
    model.seen.add_(1)
    model.table.mul_(2)
    model.array *= 2
    model.method(2)
    model.bound()
    model.pair.second["a"].append(2)
    model.groups["y"].append(1)
    model.slotted.values.append(2)
    model.slotted.empty = 3
    model.frozen["sizes"].append(3)
    model.count()
    model.dice.random()
    torch.rand(2, generator=model.source)
    model.numbers.random()
    model.old_numbers.rand()


def looks(model: Any) -> list[Any]:
    """What `change` changes."""
    return [
        len(model.inner._forward_hooks),
        len(model.inner._forward_pre_hooks),
        hasattr(model.inner, "is_new"),
        *(model.seen.tolist(), model.table.tolist(), model.array.tolist()),
        *(list(model.pair.first), list(model.pair.second["a"]), model.pair.second["a"].maxlen),
        {name: list(found) for name, found in model.groups.items()},
        *(list(model.slotted.values), hasattr(model.slotted, "empty"), list(model.frozen["sizes"])),
        model.count.__closure__[0].cell_contents,
        *(model.dice.getstate(), model.source.get_state().tolist()),
        *(str(model.numbers.bit_generator.state), str(model.old_numbers.get_state())),
    ]


def test_everything_is_left_as_it_was_found() -> None:
    model = Holder()
    before = looks(model)
    change(model)
    assert all(one != other for one, other in zip(looks(model), before, strict=True) if one != 3)
    model = Holder()
    with left_as_found(model):
        change(model)
    assert looks(model) == before


def test_also_after_a_failure() -> None:
    model = Holder()
    before = looks(model)

    def fail() -> None:
        with left_as_found(model):
            change(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert looks(model) == before


def test_a_tensor_too_large_to_be_copied_must_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_contents, "_LARGE_BYTES", 8)
    model = Holder()
    with left_as_found(model):
        model.seen.add(1)
    with pytest.raises(ConfigError, match="changes a tensor of 12"), left_as_found(model):
        model.table.mul_(2)


def copies() -> ObjectCopies:
    modules: dict[int, nn.Module] = {}

    def of_module(module: nn.Module) -> nn.Module:
        if id(module) not in modules:
            made = modules[id(module)] = object.__new__(type(module))
            vars(made).update({name: found.of(one) for name, one in vars(module).items()})
        return modules[id(module)]

    tensors: dict[int, torch.Tensor] = {}
    found = ObjectCopies(
        lambda tensor: tensors.setdefault(id(tensor), tensor.detach().clone()), of_module
    )
    return found


def test_a_copy_looks_alike_and_changes_alone() -> None:
    model = Holder()
    before = looks(model)
    copied = copies().of(model)
    assert looks(copied) == before
    change(copied)
    assert looks(model) == before
    assert type(copied.frozen) is Frozen
    assert copied.groups.default_factory is list


def test_what_two_hold_in_common_their_copies_do() -> None:
    def call() -> Any:
        return call, shared

    shared = [1]
    holder: Any = {"call": call, "shared": shared, "other": (shared, weakref.ref(call))}
    holder["self"] = holder
    copied = copies().of(holder)
    assert copied["call"]() == (copied["call"], copied["shared"])
    assert copied["call"] is not call
    assert copied["other"][0] is copied["shared"] is not shared
    assert copied["other"][1]() is copied["call"]
    assert copied["self"] is copied


def test_signs_classes_and_files_are_shared(tmp_path: Any) -> None:
    with (tmp_path / "one").open("w") as file:
        values = [object(), Slotted, random, file, len, iter([1])]
        assert all(one is other for one, other in zip(copies().of(values), values, strict=True))
