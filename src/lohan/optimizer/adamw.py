"""The AdamW update of one chunk, in place: split state (bf16) or plain state (fp32 masters).

Checks arrays, prepares the scalars and calls the native kernel; `reference.py` says the same in
torch and must agree in every bit. docs/decisions/0007 states formats and order of roundings.
Owns no memory and decides nothing about when an update runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lohan import _native
from lohan.optimizer.memory import Array, NumberFormat, call_native, memory_of
from lohan.optimizer.settings import AdamWSettings, UpdateRange, prepare_step

_GRAD_FORMATS = (NumberFormat.BF16, NumberFormat.FP16, NumberFormat.FP32)
_FP32 = (NumberFormat.FP32,)
_MOMENTS = {"m32": _FP32, "v32": _FP32}
_SPLIT_FORMATS = {"p16": (NumberFormat.BF16,), "lo16": (NumberFormat.LOW16,), **_MOMENTS}
_PLAIN_FORMATS = {"p16": (NumberFormat.BF16, NumberFormat.FP16), "p32": _FP32, **_MOMENTS}
"""Of the arrays of a state; what may have one of several is told the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitState:
    """12 bytes per parameter. The fp32 master weight is P16, LO16 and the sign bit of V32.

    `v32` holds the second moment, which is never negative; read it as its absolute value.
    """

    p16: Array
    """bf16 weights for compute: the master rounded to nearest even."""
    lo16: Array
    """16-bit integers: the low half of the master."""
    m32: Array
    v32: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainState:
    """12 bytes per parameter, 14 with `p16`: masters of their own."""

    p32: Array
    m32: Array
    v32: Array
    p16: Array | None = None
    """bf16 or fp16 weights for compute, written from the new master and never read."""


def update_states(
    grad: Array,
    state: SplitState | PlainState,
    *,
    settings: AdamWSettings,
    step: int,
    grad_scale: float = 1.0,
    ranges: Sequence[UpdateRange] | None = None,
    num_threads: int = 1,
    isa: str | None = None,
) -> None:
    """Make one AdamW step on a chunk, in place; write the `p16` of a plain state if there is one.

    The result does not depend on `num_threads`, `isa`, alignment, or on how a chunk is cut into
    calls. Runs on: the caller and `num_threads` - 1 native threads, without the GIL. May block:
    until done. Owns until: the arrays must not be touched before it returns.

    Args:
        grad: bf16, fp16 or fp32 gradients.
        state: updated in place.
        settings: betas, eps, and the rates of the whole chunk when `ranges` is None.
        step: counts from 1.
        grad_scale: every gradient is multiplied by it first.
        ranges: rates per part of the chunk; elements in no range are left as they are.
        num_threads: threads to use at most.
        isa: one of `available_isas()`; None is the best one.

    Raises:
        ConfigError: if arrays or numbers do not fit the kernel; nothing has been changed then.
        HardwareError: if this processor lacks `isa`.
    """
    grads = memory_of(grad, name="grad", allowed=_GRAD_FORMATS)
    count = grads.num_elements
    scalars = prepare_step(
        settings, step=step, num_elements=count, grad_scale=grad_scale, ranges=ranges
    )
    is_split = isinstance(state, SplitState)
    arrays: dict[str, int | str] = {}
    for name, allowed in (_SPLIT_FORMATS if is_split else _PLAIN_FORMATS).items():
        array = getattr(state, name)
        if array is None:
            continue
        memory = memory_of(array, name=name, allowed=allowed, num_elements=count, is_written=True)
        arrays[name] = memory.address
        if len(allowed) > 1:
            arrays[f"{name}_format"] = memory.number_format.value
    call_native(
        _native.adamw_split if is_split else _native.adamw_plain,
        grad=grads.address,
        grad_format=grads.number_format.value,
        num_elements=count,
        ranges=list(scalars.ranges),
        scalars=scalars.elementwise,
        num_threads=num_threads,
        isa=isa,
        **arrays,
    )
