"""Few combinations of many choices in which any two values still meet."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Pair = frozenset[tuple[str, int]]
"""Two fields, each with the number of one of its values."""


def pairs_in(row: Mapping[str, int]) -> set[Pair]:
    """The pairs of values that meet in one combination."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def pairwise(choices: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations in which any two values of two fields meet at least once.

    Greedy: begins with a pair that has not met, then gives each other field in turn the value that
    meets most of those already chosen for the first time.
    """
    counts = {name: range(len(values)) for name, values in choices.items()}
    left = {
        frozenset({(one, first), (other, second)}): None
        for one, other in itertools.combinations(counts, 2)
        for first, second in itertools.product(counts[one], counts[other])
    }
    rows = []
    while left:
        row = dict(next(iter(left)))
        for name in counts:
            if name not in row:
                row[name] = max(
                    counts[name], key=lambda value, at=(name, row): _num_new(*at, value, left)
                )
        for pair in pairs_in(row):
            left.pop(pair, None)
        rows.append({name: choices[name][row[name]] for name in counts})
    return rows


def _num_new(name: str, row: Mapping[str, int], value: int, left: Mapping[Pair, None]) -> int:
    return sum(frozenset({(name, value), known}) in left for known in row.items())
