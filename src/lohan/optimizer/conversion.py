"""Between number formats: plain conversions.

Splitting masters and joining them again is the native kernels', called by `store` on its own
memory. docs/decisions/0007 states the formats.
"""

from lohan import _native
from lohan.optimizer.memory import Array, NumberFormat, call_native, memory_of


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
