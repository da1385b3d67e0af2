"""Thinning: which of many logged steps are drawn, so that nothing that stands out is lost.

Owns the choice of rows. In every stretch of the log the first and last row stay, and for each
series the row of its lowest and of its highest value, and of its first value that is not finite.
"""

import math
from collections.abc import Sequence

_MOST_ROWS_WHOLE = 600
_STRETCHES = 600

Column = Sequence[float | None]


def kept_rows(columns: Sequence[Column], num_rows: int) -> list[int]:
    """Return the rows to draw, in order; all of them if they are few."""
    if num_rows <= _MOST_ROWS_WHOLE:
        return list(range(num_rows))
    num_stretches = max(50, _STRETCHES // max(1, len(columns)))
    kept: set[int] = {0, num_rows - 1}
    for stretch in range(num_stretches):
        begin = stretch * num_rows // num_stretches
        end = (stretch + 1) * num_rows // num_stretches
        kept |= {begin, end - 1}
        for column in columns:
            kept |= _outstanding(column, begin, end)
    return sorted(kept)


def _outstanding(column: Column, begin: int, end: int) -> set[int]:
    lowest = highest = odd = None
    for index in range(begin, end):
        value = column[index]
        if value is None:
            continue
        if not math.isfinite(value):
            odd = index if odd is None else odd
            continue
        if lowest is None or value < lowest[0]:
            lowest = (value, index)
        if highest is None or value > highest[0]:
            highest = (value, index)
    found = {extreme[1] for extreme in (lowest, highest) if extreme is not None}
    return found | ({odd} if odd is not None else set())


def evenly_spread(num_rows: int, num_wanted: int) -> list[int]:
    """Return rows for a table, from the first to the last, about equally far apart."""
    if num_rows <= num_wanted:
        return list(range(num_rows))
    return sorted({round(k * (num_rows - 1) / (num_wanted - 1)) for k in range(num_wanted)})


def running_mean(column: Column, num_rows: int) -> list[float | None]:
    """Return the mean of each finite value and those around it, `num_rows` of them in all.

    At the ends of the log there are fewer: only those that are there.
    """
    finite = [
        (index, value)
        for index, value in enumerate(column)
        if value is not None and math.isfinite(value)
    ]
    sums = [0.0]
    for _, value in finite:
        sums.append(sums[-1] + value)
    found: list[float | None] = [None] * len(column)
    half = num_rows // 2
    for place, (index, _) in enumerate(finite):
        begin, end = max(0, place - half), min(len(finite), place + half + 1)
        found[index] = (sums[end] - sums[begin]) / (end - begin)
    return found
