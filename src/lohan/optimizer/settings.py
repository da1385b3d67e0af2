"""AdamW's settings and the fp32 scalars a step needs.

The one place where numbers become fp32: everything is computed in double precision (Python
floats) and rounded once. Kernel and reference receive the same rounded values. Owns no arrays.
"""

import math
import numbers
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from lohan.errors import ConfigError


def _rounded_fp32(value: float, name: str) -> float:
    """Round to fp32; refuse what fp32 cannot hold and what would vanish."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        rounded = math.inf
    if not math.isfinite(rounded) or (rounded == 0.0 and value != 0.0):
        raise ConfigError(
            f"{name} is {value!r}",
            why=f"the kernels compute in fp32, where it is {rounded!r}",
            remedy=f"choose {name} between 1e-37 and 1e38 in size",
        )
    return rounded


def _check(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise ConfigError(
            f"{name} is {value!r}",
            why=f"it must be {expected}",
            remedy=f"set {name} to a value that is {expected}",
        )


def _check_number(name: str, value: object) -> None:
    """Refuse what only looks like a number, such as the text some YAML readers make of 1e-5."""
    # As nearly always; asking an abstract class takes a hundred times as long.
    if type(value) is float or type(value) is int:
        return
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    _check(is_number, name, value, "a number, not a text or a truth value")


def _check_rates(lr: float, weight_decay: float) -> None:
    _check_number("lr", lr)
    _check_number("weight_decay", weight_decay)
    _check(0.0 <= lr < math.inf, "lr", lr, "finite and 0 or more")
    _check(0.0 <= weight_decay < math.inf, "weight_decay", weight_decay, "finite and 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """AdamW with decoupled weight decay. `lr` and `weight_decay` hold where no range says else."""

    lr: float
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check_rates(self.lr, self.weight_decay)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            _check_number(name, beta)
            _check(0.0 <= beta < 1.0 - 2.0**-24, name, beta, "0 or more and below 1 in fp32")
        _check_number("eps", self.eps)
        _check(0.0 <= self.eps < math.inf, "eps", self.eps, "finite and 0 or more")

    def range(self, begin: int, end: int) -> "UpdateRange":
        """Elements [begin, end) with these rates."""
        return UpdateRange(begin=begin, end=end, lr=self.lr, weight_decay=self.weight_decay)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRange:
    """Elements [begin, end) of a chunk with a learning rate and weight decay of their own."""

    begin: int
    end: int
    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        _check_rates(self.lr, self.weight_decay)
        # Counts of numpy are whole numbers too, though not of type int.
        are_whole = all(
            type(one) is int or isinstance(one, numbers.Integral) for one in (self.begin, self.end)
        )
        if not are_whole or not 0 <= self.begin <= self.end:
            raise ConfigError(
                f"a range goes from element {self.begin!r} to {self.end!r}",
                why="begin must be 0 or more and end no less than begin, both whole numbers",
                remedy="give half-open ranges: begin is inside, end is not",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScalars:
    """What one step multiplies by. Every number is already a value of fp32.

    With b1 = 1 - beta1^step and b2 = 1 - beta2^step, both corrections are moved out of the
    elements: lr * (m / b1) / (sqrt(v / b2) + eps) = step_size * m / (sqrt(v) + scaled_eps).
    """

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    scaled_eps: float
    """eps * sqrt(b2)"""
    grad_scale: float
    ranges: tuple[tuple[int, int, float, float], ...]
    """(begin, end, step_size = lr * sqrt(b2) / b1, decay = lr * weight_decay), ascending"""

    @property
    def elementwise(self) -> tuple[float, float, float, float, float, float]:
        """The six scalars all elements share, in the order of the native struct."""
        return (
            self.beta1,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.scaled_eps,
            self.grad_scale,
        )


def prepare_step(
    settings: AdamWSettings,
    *,
    step: int,
    num_elements: int,
    grad_scale: float = 1.0,
    ranges: Sequence[UpdateRange] | None = None,
) -> StepScalars:
    """Return the fp32 scalars of a step over a chunk of `num_elements`.

    Args:
        settings: betas, eps, and the rates of the whole chunk when `ranges` is None.
        step: counts from 1.
        num_elements: length of the chunk.
        grad_scale: every gradient is multiplied by it first (clipping, inverse of a loss scale).
        ranges: ascending, without overlap; elements in no range are left as they are.

    Raises:
        ConfigError: if a number is not valid, or a range leaves the chunk or its order.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ConfigError(
            f"step is {step!r}",
            why="bias correction counts steps from 1",
            remedy="pass the number of the step that is being made, 1 for the first",
        )
    _check_number("grad_scale", grad_scale)
    _check(math.isfinite(grad_scale), "grad_scale", grad_scale, "finite")
    if ranges is None:
        ranges = [settings.range(0, num_elements)]
    # Far before this bound both powers are below the last place of 1; a float holds it.
    exponent = min(step, 2**53)
    root2 = math.sqrt(1.0 - settings.beta2**exponent)
    correction = root2 / (1.0 - settings.beta1**exponent)
    prepared = []
    covered_until = 0
    for one in ranges:
        if one.begin < covered_until or one.end > num_elements:
            raise ConfigError(
                f"range [{one.begin}, {one.end}) does not fit after element {covered_until} of "
                f"{num_elements}",
                why="ranges of a chunk ascend, do not overlap and end inside it",
                remedy="sort the ranges and cut them to the chunk",
            )
        covered_until = one.end
        prepared.append(
            (
                one.begin,
                one.end,
                _rounded_fp32(one.lr * correction, "lr"),
                _rounded_fp32(one.lr * one.weight_decay, "lr * weight_decay"),
            )
        )
    return StepScalars(
        beta1=_rounded_fp32(settings.beta1, "beta1"),
        one_minus_beta1=_rounded_fp32(1.0 - settings.beta1, "1 - beta1"),
        beta2=_rounded_fp32(settings.beta2, "beta2"),
        one_minus_beta2=_rounded_fp32(1.0 - settings.beta2, "1 - beta2"),
        scaled_eps=_rounded_fp32(settings.eps * root2, "eps"),
        grad_scale=_rounded_fp32(grad_scale, "grad_scale"),
        ranges=tuple(prepared),
    )
