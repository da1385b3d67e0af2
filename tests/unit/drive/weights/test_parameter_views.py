"""Parameters as views into flat buffers."""

import pytest
import torch

from lohan.drive.weights.offloaded import is_offloaded
from lohan.drive.weights.parameter_views import (
    ParameterLayout,
    ParameterSet,
    ParameterSlot,
    Weights,
)
from lohan.errors import ConfigError, ScheduleError
from support.driving_hooks import gather


def mixed() -> dict[str, torch.nn.Parameter]:
    return {
        "weight": torch.nn.Parameter(torch.randn(3, 5).to(torch.bfloat16)),
        "norm": torch.nn.Parameter(torch.randn(7)),
        "scalar": torch.nn.Parameter(torch.randn(())),
        "empty": torch.nn.Parameter(torch.empty(0, 4)),
        "code": torch.nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False),
    }


def test_every_parameter_starts_at_the_alignment_and_none_overlap() -> None:
    layout = ParameterLayout.pack(mixed())
    ends = 0
    for slot in layout.slots:
        assert slot.offset_bytes % 64 == 0
        assert slot.offset_bytes >= ends
        ends = slot.offset_bytes + slot.num_bytes
    assert layout.num_bytes >= ends
    assert layout.num_bytes % 64 == 0


def test_gather_and_bind_give_the_same_values_in_the_buffer() -> None:
    parameters = mixed()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    own = ParameterSet("block", parameters)
    flat = torch.zeros(own.layout.num_bytes, dtype=torch.uint8)
    gather(own, flat)
    own.bind(flat)
    assert own.has_buffer
    for name, parameter in parameters.items():
        assert torch.equal(parameter, before[name])
        assert parameter.is_contiguous()
    flat.zero_()
    assert all(not parameter.any() for parameter in parameters.values())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_buffer_of_any_type_serves(dtype: torch.dtype) -> None:
    own = ParameterSet("block", mixed())
    flat = torch.zeros(own.layout.num_bytes // dtype.itemsize, dtype=dtype)
    own.bind(flat)
    assert own.flat.dtype == torch.uint8


def test_released_parameters_keep_shape_type_and_identity_without_memory() -> None:
    parameters = mixed()
    shapes = {name: p.shape for name, p in parameters.items()}
    own = ParameterSet("block", parameters)
    own.bind(torch.zeros(own.layout.num_bytes, dtype=torch.uint8))
    own.release()
    own.release()
    assert not own.has_buffer
    assert {name: p.shape for name, p in parameters.items()} == shapes
    assert all(p.untyped_storage().nbytes() <= 4 for p in parameters.values())
    assert is_offloaded(parameters["weight"])
    weights = Weights([own])
    with pytest.raises(ConfigError, match=r"isnan of a parameter .*offloaded"):
        torch.isnan(parameters["weight"])
    absence = weights.absence(parameters["weight"], "a test")
    assert absence is not None
    assert absence.what.startswith("weights of block")
    with pytest.raises(ScheduleError, match="not in place"):
        _ = own.flat


def test_weights_tell_whose_memory_a_tensor_is() -> None:
    one, other = ParameterSet("one", mixed()), ParameterSet("other", mixed())
    flat = torch.zeros(one.layout.num_bytes, dtype=torch.uint8)
    one.bind(flat)
    weights = Weights([one, other])
    assert weights.place_of(one.parameters["weight"][1:].t()).own is one
    assert weights.place_of(other.parameters["weight"]) is None
    assert weights.place_of(torch.zeros(3)) is None


def test_a_view_of_a_weight_is_found_again_wherever_its_parameter_is_next() -> None:
    one = ParameterSet("one", mixed())
    one.bind(torch.zeros(one.layout.num_bytes, dtype=torch.uint8))
    one.parameters["weight"].data.copy_(torch.arange(15.0).view(3, 5))
    view = one.parameters["weight"][1:].t()
    place, values = Weights([one]).place_of(view), view.detach().clone()
    assert place is not None
    contents = {name: p.detach().clone() for name, p in one.parameters.items()}
    one.release()
    with pytest.raises(ScheduleError, match="not in place"):
        place.tensor()
    # Another buffer, with the parameters in another order and something in front.
    elsewhere = ParameterLayout.pack(dict(reversed(one.parameters.items())))
    flat = torch.zeros(elsewhere.num_bytes + 64, dtype=torch.uint8)[64:]
    one.bind(flat, elsewhere)
    for name, content in contents.items():
        one.parameters[name].data.copy_(content)
    again = place.tensor()
    assert torch.equal(again, values)
    assert again.stride() == view.stride()
    assert again.data_ptr() == one.parameters["weight"][1:].data_ptr()
    one.bind(flat, ParameterLayout.pack({"norm": one.parameters["norm"]}))
    with pytest.raises(ScheduleError, match="weight of one is not in place"):
        place.tensor()


def test_several_sets_can_share_one_ring_of_memory() -> None:
    one, other = ParameterSet("one", mixed()), ParameterSet("other", mixed())
    num_bytes = one.layout.num_bytes
    ring = torch.zeros(2 * num_bytes, dtype=torch.uint8)
    one.bind(ring[:num_bytes])
    other.bind(ring[num_bytes:])
    other.parameters["norm"].data.fill_(1.0)
    assert not one.parameters["norm"].any()
    weights = Weights([one, other])
    assert weights.place_of(one.parameters["norm"]).own is one
    assert weights.place_of(other.parameters["norm"]).own is other


def test_parameters_on_meta_come_to_life_with_their_identity() -> None:
    parameter = torch.nn.Parameter(torch.empty(2, 3, device="meta"), requires_grad=False)
    own = ParameterSet("block", {"p": parameter})
    own.release(torch.device("cpu"))
    assert parameter.device.type == "cpu"
    assert not parameter.requires_grad
    own.bind(torch.ones(own.layout.num_bytes // 4))
    assert torch.equal(parameter, torch.ones(2, 3))
    assert own.parameters["p"] is parameter


@pytest.mark.parametrize(
    "flat", [torch.zeros(3, dtype=torch.uint8), torch.zeros(64, 64), torch.zeros(4096)[::2]]
)
def test_a_buffer_that_does_not_fit_is_refused(flat: torch.Tensor) -> None:
    own = ParameterSet("block", mixed())
    with pytest.raises(ConfigError, match="flat contiguous buffer"):
        own.bind(flat)
    assert not own.has_buffer


def test_a_layout_of_another_model_is_refused() -> None:
    slot = ParameterSlot(name="weight", shape=(3, 4), dtype=torch.bfloat16, offset_bytes=0)
    with pytest.raises(ConfigError, match="weight"):
        ParameterSet("block", mixed(), ParameterLayout(slots=(slot,), num_bytes=64))


def test_places_chosen_by_the_caller_are_kept() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    slot = ParameterSlot(name="p", shape=(4,), dtype=torch.float32, offset_bytes=128)
    own = ParameterSet("b", {"p": parameter}, ParameterLayout(slots=(slot,), num_bytes=192))
    own.bind(torch.arange(48, dtype=torch.float32))
    assert parameter.tolist() == [32.0, 33.0, 34.0, 35.0]
