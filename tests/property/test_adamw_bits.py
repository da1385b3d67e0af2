"""The kernels give the bits of the reference, whatever the size, memory, threads and processor."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan import _native
from lohan.optimizer import (
    AdamWSettings,
    PlainState,
    SplitState,
    UpdateRange,
    prepare_step,
    reference,
    update_states,
)
from support.optimizer_arrays import assert_same_bits, misaligned, mixed_floats, split_state

ISAS = _native.available_kernel_isas()
GRAD_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([1023, 1024, 1025, 4096, 65536, 70001]))
ADAMW = st.builds(
    AdamWSettings,
    lr=st.sampled_from([0.0, 1e-6, 1e-3, 0.5]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.1]),
    beta1=st.sampled_from([0.0, 0.9, 0.95]),
    beta2=st.sampled_from([0.0, 0.95, 0.999]),
    eps=st.sampled_from([0.0, 1e-8, 1e-5]),
)
CASES = {
    "seed": st.integers(0, 2**32 - 1),
    "num_elements": SIZES,
    "adamw": ADAMW,
    "step": st.sampled_from([1, 2, 1000, 10**7]),
    "grad_dtype": st.sampled_from(GRAD_DTYPES),
    "grad_scale": st.sampled_from([1.0, 0.37, 2.0**-16, 0.0]),
    "share_special": st.sampled_from([0.0, 0.01, 0.3]),
    "offsets": st.lists(st.integers(0, 17), min_size=5, max_size=5),
    "num_threads": st.integers(1, 4),
    "num_cuts": st.integers(0, 3),
    "num_ranges": st.integers(0, 5),
    "isa": st.sampled_from(ISAS),
}


def ranges_in_chunk(ranges: list[UpdateRange], *, begin: int, end: int) -> list[UpdateRange]:
    """Cut a block's ranges to its elements [begin, end), counted from the chunk's first one."""
    cut = []
    for one in ranges:
        first, last = max(one.begin, begin), min(one.end, end)
        if first < last:
            cut.append(
                UpdateRange(
                    begin=first - begin,
                    end=last - begin,
                    lr=one.lr,
                    weight_decay=one.weight_decay,
                )
            )
    return cut


def random_ranges(
    rng: numpy.random.Generator, num_elements: int, num_ranges: int
) -> list[UpdateRange] | None:
    """Ascending ranges with gaps and empty ones; None for the whole chunk."""
    if num_ranges == 0:
        return None
    ends = sorted(int(one) for one in rng.integers(0, num_elements + 1, 2 * num_ranges))
    rates = [0.0, 1e-5, 3e-4, 0.1]
    return [
        UpdateRange(
            begin=begin,
            end=end,
            lr=float(rng.choice(rates)),
            weight_decay=float(rng.choice([0.0, 0.01, 1.0])),
        )
        for begin, end in zip(ends[::2], ends[1::2], strict=True)
    ]


def chunks_of(
    rng: numpy.random.Generator, num_elements: int, num_cuts: int
) -> list[tuple[int, int]]:
    cuts = sorted(int(one) for one in rng.integers(0, num_elements + 1, num_cuts))
    chunks = list(zip([0, *cuts], [*cuts, num_elements], strict=True))
    rng.shuffle(chunks)
    return [(int(begin), int(end)) for begin, end in chunks]


def random_inputs(rng, num_elements, share_special, grad_dtype):
    p, m, v, g = (
        mixed_floats(rng, num_elements, scale=scale, share_special=share_special)
        for scale in (1.0, 0.01, 1e-4, 0.1)
    )
    return p, m, v.abs(), reference.rounded(g, grad_dtype) if grad_dtype != torch.float32 else g


def whole_ranges(ranges, adamw, num_elements):
    if ranges is not None:
        return ranges
    rates = {"lr": adamw.lr, "weight_decay": adamw.weight_decay}
    return [UpdateRange(begin=0, end=num_elements, **rates)]


@settings(deadline=None, max_examples=150)
@given(**CASES)
def test_split_update_equals_the_reference(
    seed,
    num_elements,
    adamw,
    step,
    grad_dtype,
    grad_scale,
    share_special,
    offsets,
    num_threads,
    num_cuts,
    num_ranges,
    isa,
):
    rng = numpy.random.default_rng(seed)
    p, m, v, g = random_inputs(rng, num_elements, share_special, grad_dtype)
    state = split_state(p, m, v)
    ranges = random_ranges(rng, num_elements, num_ranges)
    scalars = prepare_step(
        adamw, step=step, num_elements=num_elements, grad_scale=grad_scale, ranges=ranges
    )
    expected = reference.adamw_split(g, *state, scalars)

    arrays = [misaligned(one, off) for one, off in zip((g, *state), offsets, strict=True)]
    for begin, end in chunks_of(rng, num_elements, num_cuts):
        grad, *parts = (one[begin:end] for one in arrays)
        update_states(
            grad,
            SplitState(**dict(zip(("p16", "lo16", "m32", "v32"), parts, strict=True))),
            settings=adamw,
            step=step,
            grad_scale=grad_scale,
            ranges=ranges_in_chunk(whole_ranges(ranges, adamw, num_elements), begin=begin, end=end),
            num_threads=num_threads,
            isa=isa,
        )
    assert_same_bits(arrays[0], g, "grad")
    for name, got, want in zip(("p16", "lo16", "m32", "v32"), arrays[1:], expected, strict=True):
        assert_same_bits(got, want, name)


@settings(deadline=None, max_examples=150)
@given(p16_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]), **CASES)
def test_plain_update_equals_the_reference(
    p16_dtype,
    seed,
    num_elements,
    adamw,
    step,
    grad_dtype,
    grad_scale,
    share_special,
    offsets,
    num_threads,
    num_cuts,
    num_ranges,
    isa,
):
    rng = numpy.random.default_rng(seed)
    p, m, v, g = random_inputs(rng, num_elements, share_special, grad_dtype)
    ranges = random_ranges(rng, num_elements, num_ranges)
    scalars = prepare_step(
        adamw, step=step, num_elements=num_elements, grad_scale=grad_scale, ranges=ranges
    )
    expected = reference.adamw_elements(reference.widened(g), p, m, v, scalars)

    grad, p32, m32, v32 = (
        misaligned(one, off) for one, off in zip((g, p, m, v), offsets, strict=False)
    )
    p16 = None if p16_dtype is None else misaligned(torch.zeros_like(p).to(p16_dtype), offsets[4])
    for begin, end in chunks_of(rng, num_elements, num_cuts):
        part = slice(begin, end)
        update_states(
            grad[part],
            PlainState(
                p32=p32[part],
                m32=m32[part],
                v32=v32[part],
                p16=None if p16 is None else p16[part],
            ),
            settings=adamw,
            step=step,
            grad_scale=grad_scale,
            ranges=ranges_in_chunk(whole_ranges(ranges, adamw, num_elements), begin=begin, end=end),
            num_threads=num_threads,
            isa=isa,
        )
    for name, got, want in zip(("p32", "m32", "v32"), (p32, m32, v32), expected, strict=True):
        assert_same_bits(got, want, name)
    if p16 is not None:
        for begin, end, *_ in scalars.ranges:
            rounded = reference.rounded(expected[0][begin:end], p16_dtype)
            assert_same_bits(p16[begin:end], rounded, "p16")


@pytest.mark.parametrize("isa", ISAS)
def test_a_thousand_steps_stay_equal_to_the_reference(isa):
    rng = numpy.random.default_rng(7)
    num_elements = 517
    adamw = AdamWSettings(lr=1e-2, weight_decay=0.1)
    state = split_state(
        mixed_floats(rng, num_elements, scale=1.0, share_special=0.0),
        torch.zeros(num_elements),
        torch.zeros(num_elements),
    )
    expected = state
    got = [one.clone() for one in state]
    for step in range(1, 1001):
        g = torch.from_numpy(rng.standard_normal(num_elements).astype(numpy.float32))
        g = (g * 0.1).to(torch.bfloat16)
        scalars = prepare_step(adamw, step=step, num_elements=num_elements, grad_scale=0.9)
        expected = reference.adamw_split(g, *expected, scalars)
        update_states(
            g,
            SplitState(p16=got[0], lo16=got[1], m32=got[2], v32=got[3]),
            settings=adamw,
            step=step,
            grad_scale=0.9,
            num_threads=1 + step % 3,
            isa=isa,
        )
    for name, one, want in zip(("p16", "lo16", "m32", "v32"), got, expected, strict=True):
        assert_same_bits(one, want, name)
    assert expected[0].isfinite().all()
