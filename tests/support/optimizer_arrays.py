"""Arrays for kernel tests: special values, misaligned copies, valid split states."""

import numpy
import torch

from lohan import _native
from lohan.optimizer import reference

SPECIAL_BITS = numpy.array(
    [
        *(0x00000000, 0x80000000),  # zeros
        *(0x00000001, 0x80000001, 0x007FFFFF, 0x00008000, 0x00018000),  # denormals, and ties
        *(0x00800000, 0x3F800000, 0xBF800000, 0x3F808000, 0x3F818000, 0xBF808000),
        *(0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0xFF7FFFFF),  # around the largest finite bf16
        *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x38800000, 0x387FFFFF, 0x33000000, 0x33000001),
        *(0x7F800000, 0xFF800000),  # infinities
        *(0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F808000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F810000),
        *(0xFF800001, 0xFF8000FF, 0x7FFF8000, 0x1E3CE508, 0x60AD78EC, 0x20000000),
    ],
    dtype=numpy.uint32,
)


def floats_of(bits: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(numpy.uint32).view(numpy.float32).copy())


def mixed_floats(
    rng: numpy.random.Generator, num_elements: int, *, scale: float, share_special: float
) -> torch.Tensor:
    """Normal numbers, numbers of any exponent, rounding ties and special values."""
    values = (rng.standard_normal(num_elements) * scale).astype(numpy.float32)
    bits = values.view(numpy.uint32).copy()
    kind = rng.random(num_elements)
    anything = rng.integers(0, 2**32, num_elements, dtype=numpy.uint32)
    special = rng.choice(SPECIAL_BITS, num_elements)
    ties = (bits & numpy.uint32(0xFFFF0000)) | numpy.uint32(0x8000)
    bits = numpy.where(kind < share_special, special, bits)
    bits = numpy.where((kind >= 0.5) & (kind < 0.5 + share_special), anything, bits)
    bits = numpy.where(kind > 0.9, ties, bits)
    return floats_of(bits)


def misaligned(values: torch.Tensor, offset_elements: int) -> torch.Tensor:
    """Copy into memory whose start is `offset_elements` elements past a 64-byte boundary."""
    room = torch.empty(values.numel() + offset_elements + 64, dtype=values.dtype)
    start = (-room.data_ptr() % 64) // values.element_size() + offset_elements
    view = room[start : start + values.numel()]
    bits_of(view).copy_(bits_of(values))
    return view


def split_state(
    p32: torch.Tensor, m32: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A valid split state; signs of `v` are dropped."""
    p16, lo16, tie = reference.split(p32)
    return p16, lo16, m32.clone(), reference.with_tie(v, tie)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """The bits as integers: NaNs and zeros compare by what they are."""
    same_width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(same_width[values.element_size()])


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.dtype == expected.dtype, f"{what}: {got.dtype} for {expected.dtype}"
    differ = (bits_of(got) != bits_of(expected)).nonzero().flatten()
    if differ.numel():
        first = int(differ[0])
        mask = 2 ** (8 * got.element_size()) - 1
        found, wanted = (int(bits_of(one)[first]) & mask for one in (got, expected))
        raise AssertionError(
            f"{what}: {differ.numel()} of {got.numel()} differ, first at {first}: "
            f"{found:#x} for {wanted:#x}"
        )


def split_masters(
    p32: torch.Tensor,
    *,
    p16: torch.Tensor,
    lo16: torch.Tensor,
    v32: torch.Tensor,
    num_threads: int = 1,
    isa: str = "",
) -> None:
    """Write P16, LO16 and the sign bit of V32, as a store does."""
    _native.split_masters(
        p32=p32.data_ptr(),
        p16=p16.data_ptr(),
        lo16=lo16.data_ptr(),
        v32=v32.data_ptr(),
        num_elements=p32.numel(),
        num_threads=num_threads,
        isa=isa,
    )


def join_masters(
    *,
    p16: torch.Tensor,
    lo16: torch.Tensor,
    v32: torch.Tensor,
    p32: torch.Tensor,
    num_threads: int = 1,
    isa: str = "",
) -> None:
    """Rebuild the masters, as a store does."""
    _native.join_masters(
        p16=p16.data_ptr(),
        lo16=lo16.data_ptr(),
        v32=v32.data_ptr(),
        p32=p32.data_ptr(),
        num_elements=p32.numel(),
        num_threads=num_threads,
        isa=isa,
    )
