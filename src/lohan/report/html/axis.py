"""Axis: the stretch of values a chart shows, and the round values written beside it.

Owns the way from a value to its share of the height or width. Points far outside what nearly all
others are do not flatten a chart: they lie beyond its edge, and are counted so that it can be said.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ROUND = (1.0, 2.0, 5.0, 10.0)
_ROUND_SECONDS = (120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 14400.0, 43200.0, 86400.0)
# A point is far out if it lies this many times as far from the median as 98 % of the points do.
_FAR_OUT = 4.0
_SMALLEST = 1e-300
_LEAST_GAP = 0.12  # of the width, between two labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A stretch of values, from `low` to `high`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    num_beyond: int = 0
    """Points that lie outside."""

    def share(self, value: float) -> float:
        """Return where a value lies: 0 at `low`, 1 at `high`, beyond them outside."""
        return (value - self.low) / (self.high - self.low)


def value_axis(
    values: Sequence[float],
    *,
    starts_at_zero: bool,
    is_seconds: bool = False,
    num_ticks: int = 5,
) -> Axis:
    """Choose an axis for finite values."""
    ordered = sorted(values)
    if not ordered:
        return Axis(low=0.0, high=1.0, ticks=(0.0, 1.0))
    low, high = _without_far_out(ordered)
    if starts_at_zero:
        low = min(0.0, low)
    if not high - low > 1e-9 * max(abs(high), abs(low)):
        # All alike: some room on both sides, so that the line is not on an edge.
        margin = abs(high) * 0.5 or 1.0
        low, high = (low if starts_at_zero and low == 0 else low - margin), high + margin
    step = round_step((high - low) / num_ticks, is_seconds=is_seconds)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    low, high = min(low, first * step), max(high, last * step)
    return Axis(
        low=low,
        high=high,
        ticks=tuple(index * step for index in range(first, last + 1)),
        num_beyond=sum(value < low or value > high for value in ordered),
    )


def _without_far_out(ordered: Sequence[float]) -> tuple[float, float]:
    low, high = ordered[0], ordered[-1]
    if len(ordered) < 20:
        return low, high
    middle = ordered[len(ordered) // 2]
    top = ordered[math.ceil(0.98 * len(ordered)) - 1]
    bottom = ordered[math.floor(0.02 * len(ordered))]
    reach = max(top - middle, middle - bottom)
    if reach > 0 or middle != 0:
        reach = reach or abs(middle)
        high = top if high - middle > _FAR_OUT * reach else high
        low = bottom if middle - low > _FAR_OUT * reach else low
    return low, high


def step_axis(steps: Sequence[int], *, num_ticks: int = 5) -> Axis:
    """Choose an axis for step numbers; it begins and ends with the first and the last one."""
    low, high = float(steps[0]), float(steps[-1])
    if high <= low:
        return Axis(low=low - 0.5, high=low + 0.5, ticks=(low,))
    step = max(1.0, round_step((high - low) / num_ticks))
    first, last = math.ceil(low / step), math.floor(high / step)
    ticks = [n * step for n in range(first, last + 1)]
    # Both ends are named too, where that leaves room for their neighbours.
    room = _LEAST_GAP * (high - low)
    if not ticks or ticks[0] - low > room:
        ticks.insert(0, low)
    if high - ticks[-1] > room:
        ticks.append(high)
    return Axis(low=low, high=high, ticks=tuple(ticks))


def round_step(rough: float, *, is_seconds: bool = False) -> float:
    """Return the least round number that is not below a rough one."""
    if is_seconds and rough > 50:
        for seconds in _ROUND_SECONDS:
            if seconds >= rough:
                return seconds
    power = 10.0 ** math.floor(math.log10(max(rough, _SMALLEST)))
    return next(power * factor for factor in _ROUND if power * factor >= rough * 0.999)


def decimals_for(axis: Axis) -> Callable[[float], str]:
    """Return how to print the ticks of an axis: as many decimals as tell them apart."""
    gaps = [b - a for a, b in zip(axis.ticks, axis.ticks[1:], strict=False)]
    gap = min(gaps, default=abs(axis.ticks[0]) if axis.ticks else 1.0) or 1.0
    largest = max((abs(tick) for tick in axis.ticks), default=1.0)
    if largest >= 1e6 or (0 < largest < 1e-2):
        return scientific
    decimals = max(0, -math.floor(math.log10(gap * 1.0001)))
    return lambda value: f"{value:,.{decimals}f}"


def scientific(value: float) -> str:
    """Print `2e-4` rather than `2e-04`."""
    if value == 0:
        return "0"
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
