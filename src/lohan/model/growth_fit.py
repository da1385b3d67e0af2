"""Find how a quantity grows with batch and sequence length from its values at a few points.

Owns the choice of points and the exact solution; refuses what does not grow in that form. Knows
nothing of torch or of what the quantity is. Called by the tracer.
"""

from collections.abc import Sequence
from fractions import Fraction

from lohan.model.shape import Growth

Point = tuple[int, int]
"""A batch and a sequence length."""

# Batches start at 2: a dimension of size 1 turns copies into views.
_SMALL, _LARGE, _CHECK = 2, 3, 5


def points_for(longest_sequence: int | None, *, is_sequence_fixed: bool = False) -> list[Point]:
    """Return the points to trace at; the last one only checks the solution.

    Args:
        longest_sequence: what the model can take (at least 5), or None for no limit.
        is_sequence_fixed: only the batch varies (diffusion models); sequence lengths are 0 then.
    """
    if is_sequence_fixed:
        return [(_SMALL, 0), (_LARGE, 0), (_CHECK, 0)]
    # Multiples of 8 where possible: kernels may round odd sizes up.
    step = 8 if longest_sequence is None else max(1, min(8, longest_sequence // 5))
    lengths = (2 * step, 3 * step, 5 * step)
    solved = [(batch, length) for length in lengths for batch in (_SMALL, _LARGE)]
    return [*solved, (_CHECK, 4 * step)]


def fit(points: Sequence[Point], values: Sequence[int]) -> Growth | None:
    """Return the growth that gives these values, exactly, or None if there is none.

    Args:
        points: as `points_for` returned them, or one point.
        values: the quantity at each of them.
    """
    if len(points) == 1:
        # Known at one point only: in proportion to the batch.
        return Growth(per_sequence=_number(Fraction(values[0], points[0][0])))
    lengths = [points[place][1] for place in range(0, len(points) - 1, 2)]
    slopes, shared = [], []
    for place in range(0, len(points) - 1, 2):
        slope = Fraction(values[place + 1] - values[place], _LARGE - _SMALL)
        slopes.append(slope)
        shared.append(values[place] - _SMALL * slope)
    per_sequence, per_token, per_token_pair = _polynomial(lengths, slopes)
    fixed, shared_per_token, shared_per_token_pair = _polynomial(lengths, shared)
    growth = Growth(
        fixed=_number(fixed),
        per_sequence=_number(per_sequence),
        per_token=_number(per_token),
        per_token_pair=_number(per_token_pair),
        shared_per_token=_number(shared_per_token),
        shared_per_token_pair=_number(shared_per_token_pair),
    )
    is_exact = all(
        growth.at(batch, length) == value
        for (batch, length), value in zip(points, values, strict=True)
    )
    # A curve through padded sizes may pass the check and still turn negative further out.
    is_positive = growth.at(2**10, 2**20) >= 0
    return growth if is_exact and is_positive else None


def _polynomial(places: list[int], values: list[Fraction]) -> tuple[Fraction, Fraction, Fraction]:
    """Return the coefficients 1, s, s^2 through three points (or the constant through one)."""
    if len(places) == 1:
        return values[0], Fraction(0), Fraction(0)
    # Newton's divided differences.
    first, second, third = places
    rise = (values[1] - values[0]) / (second - first)
    bend = ((values[2] - values[1]) / (third - second) - rise) / (third - first)
    return values[0] - first * (rise - bend * second), rise - bend * (first + second), bend


def _number(value: Fraction) -> float:
    return value.numerator if value.denominator == 1 else float(value)
