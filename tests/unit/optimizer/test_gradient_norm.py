"""The sum of squares has one value, whatever the chunks, the threads and the processor."""

import math
import random
import threading

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan import _native
from lohan.errors import ConfigError
from lohan.optimizer import (
    LEAF_ELEMENTS,
    MemoryRange,
    NumberFormat,
    combine_leaf_sums,
    num_leaves,
    reference,
    sum_of_squares,
)
from support.optimizer_arrays import assert_same_bits, misaligned, mixed_floats

ISAS = _native.available_kernel_isas()
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_elements=st.sampled_from([0, 1, 15, 17, 4095, 4096, 4097, 9000, 70_000, 140_001]),
    dtype=st.sampled_from(DTYPES),
    num_threads=st.integers(1, 4),
    offset=st.integers(0, 9),
    num_cuts=st.integers(0, 4),
    share_special=st.sampled_from([0.0, 0.001, 0.2]),
    isa=st.sampled_from(ISAS),
)
def test_sum_equals_the_reference_in_any_chunks_and_order(
    seed, num_elements, dtype, num_threads, offset, num_cuts, share_special, isa
):
    rng = numpy.random.default_rng(seed)
    values = mixed_floats(rng, num_elements, scale=0.1, share_special=share_special)
    grad = misaligned(values.to(dtype), offset)
    expected = reference.leaf_sums_of_squares(grad, leaf_elements=LEAF_ELEMENTS)
    canonical_nan = torch.tensor(math.nan, dtype=torch.float64)
    expected = torch.where(expected.isnan(), canonical_nan, expected)

    sums = torch.full((num_leaves(num_elements),), -1.0, dtype=torch.float64)
    cuts = sorted(int(one) for one in rng.integers(0, sums.numel() + 1, num_cuts))
    chunks = list(zip([0, *cuts], [*cuts, sums.numel()], strict=True))
    random.Random(seed).shuffle(chunks)
    num_nonfinite = sum(
        sum_of_squares(
            grad[begin * LEAF_ELEMENTS : end * LEAF_ELEMENTS],
            sums[begin:end],
            num_threads=num_threads,
            isa=isa,
        )
        for begin, end in chunks
    )
    assert_same_bits(sums, expected, "leaf sums")
    assert num_nonfinite == int((~grad.isfinite()).sum())
    total, tree = combine_leaf_sums(sums), reference.tree_sum(expected.tolist())
    assert total == tree or (math.isnan(total) and math.isnan(tree))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_order_of_adds_is_the_one_of_the_reference(dtype, isa):
    # Ordinary numbers: special ones would drown the last places that tell one order from another.
    torch.manual_seed(0)
    grad = torch.randn(100 * LEAF_ELEMENTS + 100).to(dtype)
    sums = torch.zeros(101, dtype=torch.float64)
    sum_of_squares(grad, sums, num_threads=2, isa=isa)
    expected = reference.leaf_sums_of_squares(grad, leaf_elements=LEAF_ELEMENTS)
    assert_same_bits(sums, expected, "leaf sums")


@pytest.mark.parametrize("count", [*range(40), 63, 64, 65, 1000])
def test_leaf_sums_are_added_as_the_stated_tree(count):
    values = [random.Random(count).uniform(0, 1) * 10.0 ** (i % 9) for i in range(count)]
    assert combine_leaf_sums(numpy.array(values)) == reference.tree_sum(values)


def test_many_python_threads_fill_one_array_of_leaf_sums():
    grad = torch.randn(40 * LEAF_ELEMENTS + 5).to(torch.bfloat16)
    together = torch.zeros(41, dtype=torch.float64)
    sum_of_squares(grad, together)
    apart = torch.zeros(41, dtype=torch.float64)

    def fill(leaf: int) -> None:
        part = grad[leaf * LEAF_ELEMENTS : (leaf + 1) * LEAF_ELEMENTS]
        sum_of_squares(part, apart[leaf : leaf + 1], num_threads=2)

    threads = [threading.Thread(target=fill, args=(leaf,)) for leaf in reversed(range(41))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same_bits(apart, together, "leaf sums")


def test_sum_is_close_to_the_exact_one():
    grad = torch.randn(100_000)
    sums = torch.zeros(num_leaves(100_000), dtype=torch.float64)
    sum_of_squares(grad, sums)
    exact = math.fsum(value * value for value in grad.tolist())
    assert combine_leaf_sums(sums) == pytest.approx(exact, rel=1e-14)


def test_non_finite_elements_are_counted_and_not_hidden():
    grad = torch.zeros(5000)
    grad[3], grad[4999] = math.inf, math.nan
    sums = torch.zeros(2, dtype=torch.float64)
    assert sum_of_squares(grad, sums) == 2
    assert sums[0] == math.inf
    assert math.isnan(sums[1])
    assert math.isnan(combine_leaf_sums(sums))


def test_wrong_number_of_leaf_sums_is_refused():
    with pytest.raises(ConfigError, match="leaf_sums has 1 elements, 2 expected"):
        sum_of_squares(torch.zeros(4097), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ConfigError, match="a length is not negative"):
        num_leaves(-1)


def test_leaf_sums_inside_the_gradient_are_refused():
    grad = numpy.ones(2 * LEAF_ELEMENTS, dtype=numpy.float32)
    with pytest.raises(ConfigError, match="grad and leaf_sums overlap"):
        sum_of_squares(grad, grad.view(numpy.float64)[-2:])
    assert (grad == 1.0).all()


def test_leaf_sums_at_no_address_are_refused_when_they_are_combined():
    nowhere = MemoryRange(address=0, num_elements=3, number_format=NumberFormat.FP64)
    with pytest.raises(ConfigError, match="leaf_sums has address 0"):
        combine_leaf_sums(nowhere)
