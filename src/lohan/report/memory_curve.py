"""Memory curve: bytes in use in one tier over time, against its budget.

Owns the geometry of one curve. The peak is always seen, however short it was, because that is what
a budget is about. Called by `lane_chart.py`.
"""

import math

from lohan.report import svg
from lohan.report.window import Window
from lohan.trace import Counter
from lohan.units import format_bytes

MEMORY_HEIGHT_PX = 58.0
_MEMORY_COLOUR = "#5d7fa3"


def memory_shapes(counter: Counter, name: str, window: Window, y: float) -> list[str]:
    """Draw bytes in use over time, with the budget as a dashed line."""
    ceiling = max(counter.peak_bytes, counter.budget_bytes or 0, 1)
    bottom = y + MEMORY_HEIGHT_PX
    # A little room above, so that a curve or a budget at the ceiling is still seen.
    scale = (MEMORY_HEIGHT_PX - 4) / ceiling
    shapes = [
        svg.label(24, y + 14, f"{name} in use", weight=600),
        svg.label(
            24, y + 28, f"peak {format_bytes(counter.peak_bytes)}", font_px=10, colour=svg.MUTED
        ),
        svg.box(
            window.left_px,
            y,
            window.right_px - window.left_px,
            MEMORY_HEIGHT_PX,
            colour=svg.TRACK,
        ),
    ]
    points = _steps(counter, window)
    if points:
        path = f"M{svg.number_of(points[0][0])} {svg.number_of(bottom)}"
        for x, used in points:
            path += f"H{svg.number_of(x)}V{svg.number_of(bottom - used * scale)}"
        path += f"H{svg.number_of(window.right_px)}V{svg.number_of(bottom)}Z"
        shapes.append(f'<path d="{path}" fill="{_MEMORY_COLOUR}" fill-opacity="0.75"/>')
    if counter.budget_bytes is not None:
        at = bottom - counter.budget_bytes * scale
        shapes.append(
            svg.line(window.left_px, at, window.right_px, at, colour=svg.LIMIT, is_dashed=True)
        )
        budget = f"budget {format_bytes(counter.budget_bytes)}"
        shapes.append(svg.label(24, y + 41, budget, font_px=10, colour=svg.LIMIT))
    return shapes


def _steps(counter: Counter, window: Window) -> list[tuple[float, int]]:
    """Return the curve's steps, at most two per pixel: the highest value and the last one.

    The highest must be seen, because that is what a budget is about; the last is what holds on.
    """
    points: list[tuple[float, int]] = []
    for at_seconds, used in zip(counter.at_seconds, counter.used_bytes, strict=True):
        if at_seconds > window.end_seconds:
            break
        x = math.floor(window.x(at_seconds) * 2) / 2
        if points and at_seconds <= window.start_seconds:
            points[-1] = (x, used)  # before the window only the newest value matters
        elif len(points) >= 2 and points[-1][0] == points[-2][0] == x:
            points[-2] = (x, max(points[-2][1], points[-1][1], used))
            points[-1] = (x, used)
        else:
            points.append((x, used))
    return points
