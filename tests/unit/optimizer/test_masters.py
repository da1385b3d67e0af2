"""The split of fp32 masters loses nothing; conversions round as the reference does."""

import numpy
import pytest
import torch

from lohan import _native
from lohan.errors import ConfigError
from lohan.optimizer import convert, reference
from support.optimizer_arrays import (
    SPECIAL_BITS,
    assert_same_bits,
    floats_of,
    join_masters,
    misaligned,
    split_masters,
)

ISAS = _native.available_kernel_isas()
ALL_HIGH_HALVES = numpy.arange(2**16, dtype=numpy.uint32) << 16


def split_and_join(p32: torch.Tensor, isa: str, v: torch.Tensor | None = None):
    p16 = torch.empty(p32.numel(), dtype=torch.bfloat16)
    lo16 = torch.empty(p32.numel(), dtype=torch.int16)
    v32 = torch.zeros(p32.numel()) if v is None else v.clone()
    split_masters(p32, p16=p16, lo16=lo16, v32=v32, num_threads=2, isa=isa)
    joined = torch.empty_like(p32)
    join_masters(p16=p16, lo16=lo16, v32=v32, p32=joined, isa=isa)
    return p16, lo16, v32, joined


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "low_half", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD], ids=hex
)
def test_every_high_half_is_rebuilt_with_this_low_half(low_half, isa):
    p32 = floats_of(ALL_HIGH_HALVES | numpy.uint32(low_half))
    p16, lo16, v32, joined = split_and_join(p32, isa)
    assert_same_bits(joined, p32, "master")
    expected_p16, expected_lo16, tie = reference.split(p32)
    assert_same_bits(p16, expected_p16, "p16")
    assert_same_bits(lo16, expected_lo16, "lo16")
    assert_same_bits(v32, reference.with_tie(torch.zeros_like(v32), tie), "v32")
    assert_same_bits(reference.join(p16, lo16, reference.tie_of(v32)), p32, "reference join")


@pytest.mark.parametrize("isa", ISAS)
def test_random_masters_are_rebuilt(isa):
    rng = numpy.random.default_rng(3)
    p32 = floats_of(rng.integers(0, 2**32, 2**20, dtype=numpy.uint32))
    assert_same_bits(split_and_join(p32, isa)[3], p32, "master")


@pytest.mark.slow
@pytest.mark.parametrize("stride", [16, pytest.param(1, marks=pytest.mark.long)])
def test_all_masters_are_rebuilt(stride):
    """All 2^32 patterns, or all low halves of every 16th row of 64 high ones, in arrays that are
    used again: fresh memory would cost more than all."""
    count = 2**22
    bits = torch.arange(count, dtype=torch.int32)
    p32, v32, joined = bits.view(torch.float32), torch.zeros(count), torch.empty(count)
    p16, expected = (torch.empty(count, dtype=torch.bfloat16) for _ in range(2))
    lo16 = torch.empty(count, dtype=torch.int16)
    for _ in range(2**32 // count // stride):
        split_masters(p32, p16=p16, lo16=lo16, v32=v32, num_threads=2)
        join_masters(p16=p16, lo16=lo16, v32=v32, p32=joined, num_threads=2)
        assert torch.equal(joined.view(torch.int32), bits)
        expected.copy_(p32)
        differ = p16.view(torch.int16) != expected.view(torch.int16)
        if bool(differ.any()):
            assert bool(p32[differ].isnan().all())
            assert bool(p16[differ].isnan().all())
        bits += stride * count  # wraps around to the first pattern


def test_p16_is_the_master_rounded_to_nearest_even():
    p32 = torch.tensor([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8, 3.3895313892515355e38])
    p16, *_ = split_and_join(p32, ISAS[0])
    assert p16.tolist() == [1.0, 1.0, 1.0 + 2**-6, -1.0, 3.3895313892515355e38]


def test_a_nan_never_becomes_infinite_or_zero():
    p32 = floats_of(SPECIAL_BITS)
    p16, *_ = split_and_join(p32, ISAS[0])
    assert torch.equal(p16.isnan(), p32.isnan())


def test_splitting_keeps_the_second_moment_and_replaces_an_old_tie():
    p32 = floats_of(numpy.array([0x3F808000, 0x3F818000], dtype=numpy.uint32))
    _, _, v32, _ = split_and_join(p32, ISAS[0], v=torch.tensor([0.25, -0.5]))
    assert v32.tolist() == [-0.25, 0.5]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_as_the_reference(dtype, isa):
    rng = numpy.random.default_rng(5)
    anything = rng.integers(0, 2**32, 300_000, dtype=numpy.uint32)
    # Exponents of fp16 and around it, with bits near the middle between two neighbours.
    near = (rng.integers(0x30000000, 0x48000000, 300_000, dtype=numpy.uint32) & 0xFFFFE000) + (
        rng.integers(0xFFE, 0x1003, 300_000, dtype=numpy.uint32)
    )
    lows = [ALL_HIGH_HALVES | numpy.uint32(low) for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    source = floats_of(numpy.concatenate([SPECIAL_BITS, anything, near, *lows]))
    target = misaligned(torch.zeros_like(source).to(dtype), 3)
    convert(misaligned(source, 1), target, num_threads=3, isa=isa)
    assert_same_bits(target, reference.rounded(source, dtype), str(dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widening_is_exact_for_every_pattern(dtype, isa):
    source = torch.arange(2**16).to(torch.int16).view(dtype)
    target = torch.empty(2**16)
    convert(source, target, isa=isa)
    numbers = ~source.isnan()
    assert_same_bits(target[numbers], source[numbers].to(torch.float32), "numbers")
    # A NaN keeps its sign and payload, aligned to the top of the wider fraction.
    shift = 16 if dtype is torch.bfloat16 else 13
    raw = source[~numbers].view(torch.int16).to(torch.int32) & 0xFFFF
    sign, fraction = (raw & 0x8000) << 16, (raw << shift) & 0x007FFFFF
    assert torch.equal(target[~numbers].view(torch.int32), sign | 0x7F800000 | fraction)


def test_widening_and_narrowing_return_every_number():
    for dtype in (torch.bfloat16, torch.float16):
        source = torch.arange(2**16).to(torch.int16).view(dtype)
        wide, back = torch.empty(2**16), torch.empty(2**16, dtype=dtype)
        convert(source, wide)
        convert(wide, back)
        numbers = ~source.isnan()
        assert_same_bits(back[numbers], source[numbers], str(dtype))
        assert bool(back[~numbers].isnan().all())


def test_conversion_needs_fp32_on_one_side():
    with pytest.raises(ConfigError, match="the kernel reads it as fp32"):
        convert(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float16))
    with pytest.raises(ConfigError, match="the kernel reads it as bf16 or fp16"):
        convert(torch.zeros(4), torch.zeros(4))


def test_arrays_that_share_memory_are_refused():
    room = torch.zeros(8)
    with pytest.raises(ConfigError, match="from and to overlap"):
        convert(room[:6], room.view(torch.bfloat16)[4:10])
