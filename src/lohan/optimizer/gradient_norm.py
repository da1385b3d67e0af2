"""Sum of squares of gradients, the same bits whatever the chunks, threads and processor.

Squares are summed in fp64 per leaf of `LEAF_ELEMENTS` elements; leaves are added as a tree once
all are there. Chunks cut at leaf boundaries may come in any order and from any thread: each fills
its own part of one array of leaf sums. What the norm is used for is the caller's business.
"""

from lohan import _native
from lohan.errors import ConfigError
from lohan.optimizer.memory import (
    Array,
    NumberFormat,
    call_native,
    memory_of,
    refused_arrays,
)

LEAF_ELEMENTS = _native.LEAF_ELEMENTS
"""Elements per leaf. A chunk starts at a multiple of it."""


def num_leaves(num_elements: int) -> int:
    """Return how many leaf sums a gradient of this length has."""
    if num_elements < 0:
        raise ConfigError(
            f"a gradient has {num_elements} elements",
            why="a length is not negative",
            remedy="pass 0 or more",
        )
    return -(-num_elements // LEAF_ELEMENTS)


def sum_of_squares(
    grad: Array, leaf_sums: Array, *, num_threads: int = 1, isa: str | None = None
) -> int:
    """Write the sum of squares of every leaf of a chunk; return its count of infinities and NaNs.

    A leaf with an infinity sums to infinity and one with a NaN to NaN: nothing is hidden.

    Args:
        grad: bf16, fp16 or fp32, starting at a leaf boundary of the whole gradient.
        leaf_sums: fp64, `num_leaves(len(grad))` elements.
        num_threads: threads to use at most.
        isa: one of `available_isas()`; None is the best one.

    Raises:
        ConfigError: if an array is of another format or length, or they share memory.
    """
    grads = memory_of(
        grad, name="grad", allowed=(NumberFormat.BF16, NumberFormat.FP16, NumberFormat.FP32)
    )
    sums = memory_of(
        leaf_sums,
        name="leaf_sums",
        allowed=(NumberFormat.FP64,),
        num_elements=num_leaves(grads.num_elements),
        is_written=True,
    )
    num_nonfinite: int = call_native(
        _native.sum_of_squares,
        grad=grads.address,
        grad_format=grads.number_format.value,
        num_elements=grads.num_elements,
        leaf_sums=sums.address,
        num_threads=num_threads,
        isa=isa,
    )
    return num_nonfinite


def combine_leaf_sums(leaf_sums: Array) -> float:
    """Return the sum of all leaf sums, added in a fixed order; 0.0 if there are none.

    The order is a tree: the first half (the largest power of two below the count) plus the rest,
    each half summed the same way.
    """
    sums = memory_of(leaf_sums, name="leaf_sums", allowed=(NumberFormat.FP64,))
    try:
        return _native.combined_leaf_sums(leaf_sums=sums.address, num_leaves=sums.num_elements)
    except ValueError as error:
        raise refused_arrays(error) from error
