"""What counts as different, and what is named first."""

import dataclasses
import math

import torch

from lohan.verify.differences import TOLERANCE, first_difference
from lohan.verify.plain_loop import StepOutcome, TensorStates, Trained


def states(value: float) -> TensorStates:
    return TensorStates(
        master=torch.full((2, 3), value),
        first_moment=torch.full((2, 3), value),
        second_moment=torch.full((2, 3), value),
    )


def run(*losses: float, norm: float | None = 1.0, **tensors: float) -> Trained:
    """A run whose tensors have one value after the first state and the last step."""
    return Trained(
        steps=[StepOutcome(losses=(loss,), grad_norm=norm) for loss in losses],
        states={
            0: {name: states(0.0) for name in tensors},
            **{n: {k: states(v) for k, v in tensors.items()} for n in range(1, len(losses) + 1)},
        },
    )


def test_equal_runs_have_no_difference() -> None:
    assert first_difference(run(1.0, a=1.0), run(1.0, a=1.0), tolerance=None) is None


def test_a_loss_is_named_before_tensors_and_the_earlier_step_first() -> None:
    found = first_difference(run(1.0, 2.0, a=1.0), run(1.0, 2.5, a=1.0), tolerance=None)
    assert found is not None
    assert (found.step, found.what) == (2, "loss of micro-batch 0")
    assert "is 2.5 offloaded and 2.0 in memory" in found.words


def test_a_norm_that_is_missing_is_a_difference() -> None:
    found = first_difference(run(1.0), run(1.0, norm=None), tolerance=None)
    assert found is not None
    assert "norm" in found.what
    assert math.isnan(found.found)


def test_one_bit_of_a_moment_is_found_and_named() -> None:
    expected, found = run(1.0, a=1.0, b=1.0), run(1.0, a=1.0, b=1.0)
    moment = found.states[1]["b"].second_moment
    moment.view(-1).view(torch.int32)[4] += 1
    difference = first_difference(expected, found, tolerance=None)
    assert difference is not None
    assert difference.what == "v of b"
    assert (difference.num_different, difference.num_elements) == (1, 6)


def test_the_sign_of_zero_is_a_bit_too_and_a_nan_equals_itself() -> None:
    assert first_difference(run(1.0, a=0.0), run(1.0, a=-0.0), tolerance=None) is not None
    assert (
        first_difference(run(math.nan, a=math.nan), run(math.nan, a=math.nan), tolerance=None)
        is None
    )


def test_a_tensor_that_is_missing_is_a_difference() -> None:
    found = first_difference(run(1.0, a=1.0), run(1.0), tolerance=None)
    assert found is not None
    assert found.what == "master of a"
    assert found.num_more == 2


def test_within_the_tolerance_rounding_passes_and_a_lost_update_does_not() -> None:
    rounded = run(1.0 + 1e-3, a=1.0 + 1e-3)
    assert first_difference(run(1.0, a=1.0), rounded, tolerance=TOLERANCE) is None
    lost = run(1.0, a=0.5)
    assert first_difference(run(1.0, a=1.0), lost, tolerance=TOLERANCE) is not None
    not_a_number = run(1.0, a=math.nan)
    assert first_difference(run(1.0, a=1.0), not_a_number, tolerance=TOLERANCE) is not None


def test_words_say_how_many_more_differ() -> None:
    found = first_difference(run(1.0, a=1.0, b=1.0), run(1.0, a=2.0, b=2.0), tolerance=None)
    assert found is not None
    assert "6 of 6 elements" in found.words
    assert "5 more" in found.words
    assert "more" not in dataclasses.replace(found, num_more=0).words
