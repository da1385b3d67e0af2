"""Fake tensors that code keeps outside the model: caches of functions are emptied, other places
named and refused; whatever the model itself holds is not touched."""

import functools
import gc
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from lohan.errors import ConfigError
from lohan.model.tracing.trace_model import TraceableModel
from support.small_modules import WIDTH, Mix, Model

TABLES: dict[str, torch.Tensor] = {}


def made() -> torch.Tensor:
    return torch.linspace(0.5, 2.0, WIDTH)


@functools.lru_cache
def cached() -> torch.Tensor:
    return made()


def from_a_global() -> torch.Tensor:
    if "one" not in TABLES:
        TABLES["one"] = made()
    return TABLES["one"]


class OfTheClass:
    table: ClassVar[torch.Tensor | None] = None

    def __call__(self) -> torch.Tensor:
        if OfTheClass.table is None:
            OfTheClass.table = made()
        return OfTheClass.table


class OfTheObject:
    table: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        if self.table is None:
            self.table = made()
        return self.table


def in_a_closure() -> Any:
    tables: list[torch.Tensor] = []

    def table() -> torch.Tensor:
        tables.append(made())
        return tables[-1]

    return table


class Scaled(Mix):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.table()


def trace(model: torch.nn.Module) -> None:
    traceable = TraceableModel(
        model, dtype=torch.float32, device=torch.device("cpu"), should_assume_flash=False
    )
    traceable.run(lambda *size: {"input_ids": torch.zeros(size, dtype=torch.long)}, (2, 4))


def fakes() -> int:
    gc.collect()
    return sum(type(one) is FakeTensor for one in gc.get_objects())


@pytest.mark.parametrize(
    "make",
    [
        OfTheObject,
        lambda: OfTheObject().__call__,
        lambda: functools.partial(OfTheObject.__call__, OfTheObject()),
        in_a_closure,
        lambda: functools.lru_cache(made),
        lambda: cached,
    ],
)
def test_nothing_fake_is_left_in_what_a_model_holds_or_in_a_cache(make: Any) -> None:
    before = fakes()
    model = Model([Scaled(make()), Scaled(make())])
    trace(model)
    assert fakes() <= before
    for block in model.modules():
        if isinstance(block, Scaled):
            assert torch.equal(block.table(), made())


def test_a_tensor_kept_in_a_global_table_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"keeps a tensor of shape .* in .*TABLES"):
        trace(Model([Scaled(from_a_global), Scaled(from_a_global)]))
    TABLES.clear()


def test_a_tensor_kept_on_a_class_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"in class .*OfTheClass"):
        trace(Model([Scaled(OfTheClass()), Scaled(OfTheClass())]))
    OfTheClass.table = None


def test_a_table_that_is_there_before_is_no_matter() -> None:
    TABLES["one"] = made()
    trace(Model([Scaled(from_a_global), Scaled(from_a_global)]))
    assert torch.equal(TABLES.pop("one"), made())
