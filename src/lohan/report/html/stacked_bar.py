"""Stacked bar: what a memory is used for, against what is allowed.

Owns the geometry of one bar in shares of its width, so it follows the page. The words are in the
table below it. Called by the memory section.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lohan.report.html.markup import filled
from lohan.report.svg import number_of

NUM_COLOURS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPiece:
    """One part of a bar."""

    nbytes: int
    colour: int
    """Which colour of the page, from 1."""
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across the bar."""

    look: str
    """Class name: `budget` or `peak`."""
    nbytes: int
    hint: str


def stacked_bar(anchor: str, pieces: Sequence[BarPiece], marks: Sequence[Mark]) -> str:
    """Return a bar of pieces from left to right, with marks across.

    The element `<anchor>-title` elsewhere on the page is its name.
    """
    total_bytes = sum(piece.nbytes for piece in pieces)
    # A little room on the right: a mark at the very end would be cut in half.
    scale = 99.0 / max(total_bytes, *(mark.nbytes for mark in marks), 1)
    placed = []
    left = 0.0
    for piece in pieces:
        width = piece.nbytes * scale
        placed.append((piece, number_of(left), number_of(width)))
        left += width
    hints = [piece.hint for piece in pieces] + [mark.hint for mark in marks]
    return filled(
        "stacked_bar.html",
        anchor=anchor,
        described=" ".join(f"{hint}." for hint in hints),
        pieces=placed,
        marks=[(mark, number_of(mark.nbytes * scale)) for mark in marks],
    )
