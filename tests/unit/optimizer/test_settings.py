"""Settings are checked, scalars are doubles rounded to fp32 once, ranges are cut to chunks."""

import math

import numpy
import pytest

from lohan.errors import ConfigError
from lohan.optimizer import AdamWSettings, UpdateRange, prepare_step

ADAMW = AdamWSettings(lr=1e-3)


def test_scalars_are_doubles_rounded_once():
    scalars = prepare_step(ADAMW, step=3, num_elements=10, grad_scale=0.1)
    root2 = math.sqrt(1 - 0.999**3)
    assert scalars.beta1 == float(numpy.float32(0.9))
    assert scalars.one_minus_beta1 == float(numpy.float32(1 - 0.9))
    assert scalars.one_minus_beta2 == float(numpy.float32(1 - 0.999))
    assert scalars.scaled_eps == float(numpy.float32(1e-8 * root2))
    assert scalars.grad_scale == float(numpy.float32(0.1))
    step_size = float(numpy.float32(1e-3 * (root2 / (1 - 0.9**3))))
    assert scalars.ranges == ((0, 10, step_size, float(numpy.float32(1e-3 * 0.01))),)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lr", value) for value in (-1e-9, math.nan, math.inf)),
        *(("weight_decay", value) for value in (-0.1, math.nan, math.inf)),
        *(("beta1", value) for value in (-0.1, 1.0, math.nan)),
        *(("beta2", value) for value in (1.0, 1.0 - 1e-9)),
        *(("eps", value) for value in (-1e-8, math.inf, math.nan)),
    ],
)
def test_impossible_settings_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is"):
        AdamWSettings(**{"lr": 1e-3, name: value})


@pytest.mark.parametrize("step", [0, -1, 1.0, True])
def test_steps_count_from_one(step):
    with pytest.raises(ConfigError, match="bias correction counts steps from 1"):
        prepare_step(ADAMW, step=step, num_elements=1)


@pytest.mark.parametrize("grad_scale", [math.nan, math.inf, 1e39, 1e-50])
def test_a_gradient_scale_that_fp32_cannot_hold_is_refused(grad_scale):
    with pytest.raises(ConfigError, match="grad_scale is"):
        prepare_step(ADAMW, step=1, num_elements=1, grad_scale=grad_scale)


def test_an_eps_that_vanishes_in_fp32_is_refused():
    with pytest.raises(ConfigError, match=r"where it is 0\.0"):
        prepare_step(AdamWSettings(lr=1e-3, eps=1e-60), step=1, num_elements=1)


def a_range(begin, end):
    return UpdateRange(begin=begin, end=end, lr=0.1, weight_decay=0.0)


@pytest.mark.parametrize(
    "ranges", [[(0, 11)], [(0, 5), (4, 6)], [(5, 6), (0, 5)]], ids=["outside", "overlap", "order"]
)
def test_ranges_must_ascend_inside_the_chunk(ranges):
    with pytest.raises(ConfigError, match="ranges of a chunk ascend"):
        prepare_step(ADAMW, step=1, num_elements=10, ranges=[a_range(*one) for one in ranges])


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (4, 3)])
def test_a_range_goes_forward(begin, end):
    with pytest.raises(ConfigError, match="begin must be 0 or more"):
        a_range(begin, end)


@pytest.mark.parametrize("name", ["lr", "weight_decay", "beta1", "beta2", "eps"])
@pytest.mark.parametrize("value", ["1e-5", None, True])
def test_what_only_looks_like_a_number_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value!r}: it must be a number"):
        AdamWSettings(**{"lr": 1e-3, name: value})


def test_a_gradient_scale_that_is_a_text_is_refused():
    with pytest.raises(ConfigError, match="grad_scale is '1': it must be a number"):
        prepare_step(ADAMW, step=1, num_elements=1, grad_scale="1")


@pytest.mark.parametrize(("begin", "end"), [(0.5, 3), (0, 2.0), ("a", "b"), (None, 1)])
def test_ranges_of_anything_but_whole_numbers_are_refused(begin, end):
    with pytest.raises(ConfigError, match="whole number"):
        UpdateRange(begin=begin, end=end, lr=1e-3, weight_decay=0.0)


def test_ranges_may_be_counts_of_numpy():
    one = UpdateRange(begin=numpy.int64(0), end=numpy.int64(2), lr=1e-3, weight_decay=0.0)
    assert prepare_step(ADAMW, step=1, num_elements=2, ranges=[one]).ranges[0][:2] == (0, 2)


def test_bias_correction_ends_at_one_however_many_steps_were_made():
    late = prepare_step(ADAMW, step=2**53, num_elements=1)
    assert late == prepare_step(ADAMW, step=10**400, num_elements=1)
    assert late.ranges[0][2] == float(numpy.float32(1e-3))
