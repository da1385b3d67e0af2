"""Flat sums of gradients are what `.grad` would be."""

import torch

from lohan.drive.gradient_sums import GradientSums
from lohan.drive.weights.parameter_views import ParameterSet
from lohan.vocabulary import BlockId
from support.driving_hooks import gradients_by_name

SEGMENT = BlockId(3)


def sums_of(parameters: dict[str, torch.nn.Parameter]) -> GradientSums:
    own = ParameterSet("block", parameters)
    return GradientSums(
        {SEGMENT: own}, lambda _, num_bytes: torch.full((num_bytes,), 255, dtype=torch.uint8)
    )


def test_the_first_gradient_is_copied_with_the_sign_of_zero() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    sums = sums_of({"p": parameter})
    sums.add(parameter, torch.tensor([-0.0, 0.0]))
    finished = sums.finish(SEGMENT)
    assert finished is not None
    assert torch.signbit(gradients_by_name(finished)["p"]).tolist() == [True, False]


def test_sums_are_rounded_in_the_type_of_the_parameter_after_each_addition() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    sums = sums_of({"p": parameter})
    for value in (256.0, 1.0, 1.0):
        sums.add(parameter, torch.tensor([value], dtype=torch.bfloat16))
    finished = sums.finish(SEGMENT)
    assert finished is not None
    assert gradients_by_name(finished)["p"].item() == 256.0  # in one go it would be 258


def test_padding_and_missing_gradients_are_zero_and_missing_ones_are_named() -> None:
    used, unused = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(5))
    frozen = torch.nn.Parameter(torch.zeros(7), requires_grad=False)
    sums = sums_of({"unused": unused, "frozen": frozen, "used": used})
    sums.add(used, torch.ones(3))
    finished = sums.finish(SEGMENT)
    assert finished is not None
    assert finished.missing == {"unused"}
    assert finished.layout.names() == ("unused", "used")
    assert finished.flat.view(torch.float32).sum() == 3
    assert list(gradients_by_name(finished)) == ["used"]


def test_a_segment_whose_parameters_got_nothing_is_all_missing() -> None:
    sums = sums_of({"p": torch.nn.Parameter(torch.zeros(3))})
    finished = sums.finish(SEGMENT)
    assert finished is not None
    assert finished.missing == {"p"}
    assert not finished.flat.any()


def test_a_frozen_segment_has_no_gradients() -> None:
    assert (
        sums_of({"p": torch.nn.Parameter(torch.zeros(3), requires_grad=False)}).finish(SEGMENT)
        is None
    )
