"""Window: the stretch of time a chart shows, its scale, and the axis below it.

Owns the way from seconds to pixels, and the choice of round times. Shared by the lanes and the
memory curves of a chart, so that they line up.
"""

import math
from dataclasses import dataclass

from lohan.report import svg
from lohan.report.html.axis import round_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The stretch of time that is shown, and where it lies in the picture."""

    start_seconds: float
    end_seconds: float
    left_px: float
    right_px: float

    @property
    def px_per_second(self) -> float:
        """Scale of the picture."""
        return (self.right_px - self.left_px) / (self.end_seconds - self.start_seconds)

    def x(self, seconds: float) -> float:
        """Return where a time lies; times outside the window lie on its edge."""
        inside = min(max(seconds, self.start_seconds), self.end_seconds)
        return self.left_px + (inside - self.start_seconds) * self.px_per_second


def axis_shapes(window: Window, top: float, bottom: float) -> list[str]:
    """Draw grid lines from `top` to `bottom`, with the times below them."""
    shapes = []
    for at_seconds, words in ticks(window.start_seconds, window.end_seconds):
        x = window.x(at_seconds)
        shapes.append(svg.line(x, top - 4, x, bottom, colour=svg.GRID))
        shapes.append(
            svg.label(x, bottom + 14, words, font_px=10.5, colour=svg.MUTED, anchor="middle")
        )
    return shapes


def ticks(start_seconds: float, end_seconds: float) -> list[tuple[float, str]]:
    """Return round times within the window, about ten, each with its text."""
    step = round_step((end_seconds - start_seconds) / 10)
    unit, unit_seconds = "s", 1.0
    for name, seconds in (("ms", 1e-3), ("us", 1e-6)):
        if end_seconds < unit_seconds:
            unit, unit_seconds = name, seconds
    decimals = max(0, -math.floor(math.log10(step / unit_seconds * 1.0001)))
    first = math.ceil(start_seconds / step - 1e-9)
    last = math.floor(end_seconds / step + 1e-9)
    return [
        (index * step, f"{index * step / unit_seconds:.{decimals}f} {unit}")
        for index in range(first, last + 1)
    ]
