"""A model's buffers in the form they have in a seal."""

import json
from typing import Any

import pytest
import torch

from lohan.engine.model_buffers import ModelBuffers, changed_buffers, put_buffers, stored_buffers
from lohan.errors import CheckpointError
from lohan.model.tracing.kept_contents import left_as_found

VALUES = [
    torch.tensor(3),
    torch.tensor([True, False]),
    torch.randn(2, 3).to(torch.bfloat16),
    torch.tensor([float("nan"), -0.0, float("inf")]),
    torch.tensor([1 + 2j]),
    torch.empty(0, 4),
    torch.arange(12).view(3, 4).T,
    torch.zeros(2).to(torch.float8_e4m3fn),
    torch.ones(()).expand(5),
]


def with_buffer(value: torch.Tensor | None, *, persistent: bool = True) -> torch.nn.Module:
    outer = torch.nn.Module()
    outer.inner = torch.nn.Module()
    outer.inner.register_buffer("own", value, persistent=persistent)
    return outer


def through_json(found: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(found, allow_nan=False)
    assert text.isascii()
    return dict(json.loads(text))


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.dtype}-{tuple(value.shape)}")
def test_every_kind_of_value_comes_back_with_its_bits(value: torch.Tensor) -> None:
    found = through_json(ModelBuffers(with_buffer(value)).to_json())
    back = stored_buffers(found)["inner.own"]
    assert back.dtype is value.dtype
    assert back.shape == value.shape
    if value.numel():
        bits = value.contiguous().view(-1).view(torch.uint8)
        assert torch.equal(back.reshape(-1).view(torch.uint8), bits)


def test_only_what_changed_is_said_to_have_changed() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2).eval())
    buffers = ModelBuffers(model)
    assert not changed_buffers(buffers.to_json())
    model(torch.randn(4, 2))
    names = {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert changed_buffers(buffers.to_json()).keys() == names
    assert stored_buffers(buffers.to_json()).keys() == dict(model.named_buffers()).keys()


def test_what_a_model_does_not_save_is_not_sealed() -> None:
    assert ModelBuffers(with_buffer(torch.ones(2), persistent=False)).to_json() == {}


@pytest.mark.parametrize("own", [None, torch.zeros(7), torch.zeros(2, dtype=torch.int32)])
def test_a_buffer_of_another_shape_or_type_is_replaced(own: torch.Tensor | None) -> None:
    model = with_buffer(own)
    put_buffers(model, {"inner.own": torch.ones(2)})
    assert torch.equal(model.inner.own, torch.ones(2))


def test_a_buffer_under_two_names_stays_one() -> None:
    model = with_buffer(torch.zeros(2))
    model.register_buffer("other", model.inner.own)
    found = ModelBuffers(model).to_json()
    model.inner.own.fill_(5)
    ModelBuffers(model, found)
    assert model.inner.own is model.other
    assert not model.other.any()


@pytest.mark.parametrize(
    "damage",
    [{"values": "AAAA"}, {"values": "*"}, {"dtype": "float33"}, {"shape": [9]}, {"checksum": 1}],
)
def test_a_damaged_entry_is_refused(damage: dict[str, Any]) -> None:
    found = ModelBuffers(with_buffer(torch.ones(2))).to_json()
    found["inner.own"] |= damage
    with pytest.raises(CheckpointError, match=r"buffer inner\.own in a seal cannot be read"):
        ModelBuffers(with_buffer(torch.ones(2)), found)


def test_expanded_buffers_are_put_back() -> None:
    def make(value: float) -> torch.nn.Module:
        model = torch.nn.Module()
        model.register_buffer("spread", torch.full((2, 1), value).expand(2, 5))
        return model

    sealed = ModelBuffers(make(2.0)).to_json()
    model = make(1.0)
    ModelBuffers(model, sealed)
    assert torch.equal(model.spread, torch.full((2, 5), 2.0))


def test_a_forward_that_leaves_no_trace_puts_expanded_buffers_back() -> None:
    model = torch.nn.Module()
    model.register_buffer("spread", torch.ones(1).expand(5))
    with left_as_found(model):
        model.spread[:1] = 3.0
    assert torch.equal(model.spread, torch.ones(5))
