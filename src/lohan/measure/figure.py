"""A measured figure: its samples, their middle and their spread. And the clock it is taken with.

Owns how often and how long something is repeated. Knows nothing of what is measured.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Clock = Callable[[], float]
"""Seconds since some fixed moment; never goes back."""

NUM_ROUNDS = 3
MOST_SPREAD = 0.25
"""Samples further apart were taken under load, and are not worth remembering."""
_MOST_REPEATS = 100_000  # so that a clock that stands still cannot hang a measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A rate, measured several times."""

    samples: tuple[Annotated[float, Meta(gt=0, le=sys.float_info.max)], ...]
    """Per second, in the order they were taken."""

    def __post_init__(self) -> None:
        assert self.samples, "a figure has at least one sample"

    @property
    def per_second(self) -> float:
        """The middle sample: one hiccup of the machine does not move it."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """How far the samples lie apart, as a share of the figure."""
        return (max(self.samples) - min(self.samples)) / self.per_second


def repeat(work: Callable[[], float], *, seconds: float, clock: Clock) -> float:
    """Repeat `work` for `seconds`, at least once; return what it did per second.

    `work` ends when what it does has ended, not when it is queued, and returns how much it did.
    """
    started = clock()
    done = 0.0
    for _ in range(_MOST_REPEATS):
        done += work()
        if clock() - started >= seconds:
            break
    return rate_of(done, clock() - started)


def rate_of(amount: float, seconds: float) -> float:
    """An amount per second, where a clock may be too coarse to see the time."""
    return amount / max(seconds, 1e-9)


def measure_rounds(work: Callable[[], float], *, seconds: float, clock: Clock) -> Figure:
    """Take `NUM_ROUNDS` samples of `seconds` each."""
    return Figure(
        samples=tuple(repeat(work, seconds=seconds, clock=clock) for _ in range(NUM_ROUNDS))
    )
