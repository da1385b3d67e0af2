"""Colours of kinds: the same kind has the same colour in every chart.

Compute is in strong colours, moves in lighter ones of the tensor they carry. Neighbours in a chart
differ in lightness too, so they stay apart in grey and for people who see fewer colours.
"""

from collections.abc import Iterable

from lohan.vocabulary import ComputeKind, TensorKind

COLOUR_OF_KIND: dict[str, str] = {
    ComputeKind.FORWARD: "#2f6db5",
    ComputeKind.RECOMPUTE: "#e9b44c",
    ComputeKind.BACKWARD: "#c8553d",
    ComputeKind.UPDATE: "#3a8f5c",
    ComputeKind.NORM: "#7d6450",
    ComputeKind.REDUCE: "#a0527f",
    TensorKind.P16: "#7fb2e0",
    TensorKind.G16: "#f09a7c",
    TensorKind.P32: "#8ccfa6",
    TensorKind.OS32: "#4fae9c",
    TensorKind.A16: "#b7a0d8",
}
_FOR_OTHERS = ("#8a94a0", "#c2a878", "#5d6b8a", "#b5bd6b", "#a9839b", "#6fa3a8")
_LUMINANCE_OF_LIGHT = 0.22


def colours_for(kinds: Iterable[str]) -> dict[str, str]:
    """Return a colour for every kind, in the order of the legend: known kinds first."""
    present = set(kinds)
    others = sorted(present - set(COLOUR_OF_KIND))
    colours = {kind: colour for kind, colour in COLOUR_OF_KIND.items() if kind in present}
    return colours | {kind: _FOR_OTHERS[i % len(_FOR_OTHERS)] for i, kind in enumerate(others)}


def is_light(colour: str) -> bool:
    """Return whether dark text reads better on a colour than white text."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    luminance: float = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    return luminance > _LUMINANCE_OF_LIGHT
