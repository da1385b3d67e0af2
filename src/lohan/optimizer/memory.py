"""Arrays as the kernels see them: an address, a count of elements and a number format.

Owns the checks an address cannot make by itself: dtype, contiguity, length, device, writability.
Accepts torch tensors, numpy arrays and plain addresses (buffers of the SSD engine) without
importing torch. Owns too conversions between formats; splitting masters and joining them again is
the native kernels', called by `store` on its own memory (docs/decisions/0007 states the formats).
Called by the other files of this folder, before every native call.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, Union

from lohan import _native
from lohan.errors import ConfigError, HardwareError

if TYPE_CHECKING:
    import numpy
    import torch


class NumberFormat(StrEnum):
    """How the bits of one element are read."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"
    LOW16 = "low16"
    """The low half of an fp32 master weight (LO16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRange:
    """Elements at an address. It keeps nothing alive: the caller owns the memory."""

    address: int
    num_elements: int
    number_format: NumberFormat


# Written with Union because the quoted names are not imported at run time.
Array: TypeAlias = Union["torch.Tensor", "numpy.ndarray[Any, Any]", MemoryRange]

_FORMAT_OF_DTYPE = {
    "bfloat16": NumberFormat.BF16,
    "float16": NumberFormat.FP16,
    "float32": NumberFormat.FP32,
    "float64": NumberFormat.FP64,
}
_RAW_16_BIT_DTYPES = ("int16", "uint16")
_16_BIT_FORMATS = (NumberFormat.BF16, NumberFormat.FP16, NumberFormat.LOW16)


def available_isas() -> tuple[str, ...]:
    """Instruction sets the kernels can use on this processor, the best and default one first.

    All give the same bits; which one is used is shown to the user because it sets the pace.
    """
    return tuple(_native.available_kernel_isas())


def memory_of(
    array: Array,
    *,
    name: str,
    allowed: tuple[NumberFormat, ...],
    num_elements: int | None = None,
    is_written: bool = False,
) -> MemoryRange:
    """Return where an array is, after checking that a kernel may work on it.

    Integers of 16 bits are taken as the one 16-bit format in `allowed`; if there are two, the
    array must say which it is.

    Raises:
        ConfigError: if the array is of another format, length, layout or device, or read-only.
    """
    if isinstance(array, MemoryRange):
        memory, found = array, str(array.number_format)
    else:
        memory, found = _memory_of_object(array, name, allowed, is_written)
    if memory.number_format not in allowed:
        _refuse_format(name, found, allowed)
    if num_elements is not None and memory.num_elements != num_elements:
        raise ConfigError(
            f"{name} has {memory.num_elements} elements, {num_elements} expected",
            why="all arrays of one call describe the same parameters",
            remedy=f"pass the part of {name} that belongs to the other arrays",
        )
    if memory.num_elements < 0 or not 0 <= memory.address < 2**64:
        raise ConfigError(
            f"{name} has address {memory.address} and {memory.num_elements} elements",
            why="neither may be negative, and an address has 64 bits",
            remedy="pass the address and length of memory that exists",
        )
    return memory


def _memory_of_object(
    array: Any, name: str, allowed: tuple[NumberFormat, ...], is_written: bool
) -> tuple[MemoryRange, str]:
    dtype = _name_of(getattr(array, "dtype", ""))
    number_format = _FORMAT_OF_DTYPE.get(dtype)
    raw_meanings = [one for one in allowed if one in _16_BIT_FORMATS]
    if dtype in _RAW_16_BIT_DTYPES and len(raw_meanings) == 1:
        number_format = raw_meanings[0]
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise ConfigError(
                f"{name} is on {array.device}",
                why="the kernels run on the CPU and read main memory",
                remedy=f"copy {name} to the CPU first",
            )
        is_plain = "strided" in str(array.layout) and not array.is_neg()
        if not is_plain:
            raise ConfigError(
                f"{name} is a tensor whose memory does not hold its values as they are",
                why=f"its layout is {array.layout}, or it is a negated view",
                remedy=f"pass {name}.to_dense() or {name}.resolve_neg()",
            )
        is_contiguous, num_elements = array.is_contiguous(), array.numel()
        address, is_writable = array.data_ptr(), True
    elif hasattr(array, "__array_interface__"):
        is_contiguous, num_elements = array.flags.c_contiguous, array.size
        address, is_writable = array.ctypes.data, array.flags.writeable
    else:
        raise ConfigError(
            f"{name} is a {type(array).__name__}",
            why="its memory cannot be found",
            remedy="pass a torch tensor, a numpy array or a MemoryRange",
        )
    if number_format is None:
        _refuse_format(name, dtype, allowed)
    if not is_contiguous:
        raise ConfigError(
            f"{name} is not contiguous",
            why="the kernels walk memory element after element",
            remedy=f"pass {name}.contiguous(), or the flat buffer it is a view of",
        )
    if is_written and not is_writable:
        raise ConfigError(
            f"{name} is read-only", why="it is updated in place", remedy="pass a writable array"
        )
    return (
        MemoryRange(address=address, num_elements=num_elements, number_format=number_format),
        dtype,
    )


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_format(name: str, found: str, allowed: tuple[NumberFormat, ...]) -> NoReturn:
    raise ConfigError(
        f"{name} is of format {found}",
        why=f"the kernel reads it as {' or '.join(allowed)}",
        remedy=f"convert {name}, or pass a MemoryRange that states its format",
    )


def call_native(
    function: Callable[..., Any], *, num_threads: int, isa: str | None, **kw: Any
) -> Any:
    """Call a kernel, with its refusals told as errors of lohan.

    Runs on: the caller and `num_threads` - 1 native threads, without the GIL. May block: until the
    kernel is done. Owns until: the arrays belong to the kernel until this returns.

    Raises:
        ConfigError: for fewer than one thread, and for arrays that overlap or are misaligned.
        HardwareError: if this processor lacks the instruction set asked for.
    """
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 1:
        raise ConfigError(
            f"num_threads is {num_threads!r}",
            why="a kernel runs on one thread or more",
            remedy="pass a whole number of 1 or more",
        )
    if isa is not None and isa not in available_isas():
        raise HardwareError(
            f"the kernels have no instruction set {isa!r} on this processor",
            why=f"available are {', '.join(available_isas())}",
            remedy="pass one of these, or None for the best",
        )
    try:
        return function(num_threads=min(num_threads, 1024), isa=isa or "", **kw)
    except ValueError as error:
        raise refused_arrays(error) from error


def refused_arrays(error: ValueError) -> ConfigError:
    """What a native call said about its arrays, as an error of lohan."""
    return ConfigError(
        str(error),
        why="the kernels work on separate arrays aligned to their own elements",
        remedy="pass arrays that do not share memory, each aligned to its element size",
    )


def convert(source: Array, target: Array, *, num_threads: int = 1, isa: str | None = None) -> None:
    """Convert between fp32 and bf16 or fp16, in either direction, into `target`.

    Narrowing rounds to nearest even, overflows to infinity and makes every NaN the canonical one.
    Widening is exact.

    Raises:
        ConfigError: if formats or lengths do not fit, or the arrays share memory.
    """
    narrow = (NumberFormat.BF16, NumberFormat.FP16)
    read = memory_of(source, name="source", allowed=(*narrow, NumberFormat.FP32))
    written = memory_of(
        target,
        name="target",
        allowed=narrow if read.number_format is NumberFormat.FP32 else (NumberFormat.FP32,),
        num_elements=read.num_elements,
        is_written=True,
    )
    call_native(
        _native.convert,
        source=read.address,
        source_format=read.number_format.value,
        target=written.address,
        target_format=written.number_format.value,
        num_elements=read.num_elements,
        num_threads=num_threads,
        isa=isa,
    )
