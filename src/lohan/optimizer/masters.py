"""Between number formats: fp32 masters and their lossless split, and plain conversions.

Used when weights are imported and exported; the update itself works on the split state directly.
docs/decisions/0007 states the formats.
"""

from lohan import _native
from lohan.optimizer.memory import Array, MemoryRange, NumberFormat, call_native, memory_of

_FP32 = (NumberFormat.FP32,)
_BF16 = (NumberFormat.BF16,)
_LOW16 = (NumberFormat.LOW16,)


def split_masters(
    p32: Array,
    *,
    p16: Array,
    lo16: Array,
    v32: Array,
    num_threads: int = 1,
    isa: str | None = None,
) -> None:
    """Write P16, LO16 and the sign bit of V32, from which `join_masters` rebuilds every bit of P32.

    The magnitude in `v32` is kept, so it must hold the second moment (zeros at the start).

    Raises:
        ConfigError: if an array is of another format or length, or shares memory with another.
    """
    masters = memory_of(p32, name="p32", allowed=_FP32)
    count = masters.num_elements
    call_native(
        _native.split_masters,
        p32=masters.address,
        p16=_part(p16, "p16", _BF16, count, is_written=True),
        lo16=_part(lo16, "lo16", _LOW16, count, is_written=True),
        v32=_part(v32, "v32", _FP32, count, is_written=True),
        num_elements=count,
        num_threads=num_threads,
        isa=isa,
    )


def join_masters(
    *,
    p16: Array,
    lo16: Array,
    v32: Array,
    p32: Array,
    num_threads: int = 1,
    isa: str | None = None,
) -> None:
    """Rebuild the fp32 masters of a split state into `p32`, bit for bit.

    Raises:
        ConfigError: if an array is of another format or length, or shares memory with another.
    """
    masters = memory_of(p32, name="p32", allowed=_FP32, is_written=True)
    count = masters.num_elements
    call_native(
        _native.join_masters,
        p16=_part(p16, "p16", _BF16, count),
        lo16=_part(lo16, "lo16", _LOW16, count),
        v32=_part(v32, "v32", _FP32, count),
        p32=masters.address,
        num_elements=count,
        num_threads=num_threads,
        isa=isa,
    )


def convert(source: Array, target: Array, *, num_threads: int = 1, isa: str | None = None) -> None:
    """Convert between fp32 and bf16 or fp16, in either direction, into `target`.

    Narrowing rounds to nearest even, overflows to infinity and makes every NaN the canonical one.
    Widening is exact.

    Raises:
        ConfigError: if formats or lengths do not fit, or the arrays share memory.
    """
    narrow = (NumberFormat.BF16, NumberFormat.FP16)
    read: MemoryRange = memory_of(source, name="source", allowed=(*narrow, NumberFormat.FP32))
    written = memory_of(
        target,
        name="target",
        allowed=narrow if read.number_format is NumberFormat.FP32 else _FP32,
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


def _part(
    array: Array,
    name: str,
    allowed: tuple[NumberFormat, ...],
    count: int,
    *,
    is_written: bool = False,
) -> int:
    memory = memory_of(array, name=name, allowed=allowed, num_elements=count, is_written=is_written)
    return memory.address
