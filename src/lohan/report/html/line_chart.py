"""Line chart: logged numbers over steps, as wide as its place, with its numbers as a table.

Owns the geometry. The plot is stretched by the browser and its words are HTML beside it, so letters
keep their size from a phone to a wide screen. Values that are not finite break the line and leave a
mark. Called by the sections of a page.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lohan.report.html.axis import Axis, decimals_for, step_axis, value_axis
from lohan.report.html.markup import Table, as_markup, filled
from lohan.report.html.thinning import Column, evenly_spread, kept_rows
from lohan.report.svg import number_of
from lohan.units import format_count

_WIDTH, _HEIGHT = 1000.0, 300.0  # of the stretched plot; the page decides its pixels
_TABLE_ROWS = 40
_MOST_MARKS = 100
_LARGEST = 1e100
_EDGE_SHARE = 0.06  # a label this near an edge does not stick out beyond it


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: a number per logged step."""

    name: str
    values: Column
    colour: int
    """Which colour of the page, from 1."""
    look: str = ""
    """Class names: `faint`, `dashed`, `dots`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What a chart shows."""

    anchor: str
    title: str
    steps: Sequence[int]
    series: tuple[Series, ...]
    format_value: Callable[[float], str]
    format_tick: Callable[[float], str] | None = None
    """None: as many decimals as are needed."""
    starts_at_zero: bool = True
    is_seconds: bool = False
    is_small: bool = False
    remark: str = ""


def line_chart(chart: Chart) -> str:
    """Return a figure, or nothing if there is no number to show."""
    present = [one for one in chart.series if any(value is not None for value in one.values)]
    if not present:
        return ""
    chosen = [n for n in range(len(chart.steps)) if any(s.values[n] is not None for s in present)]
    steps = [chart.steps[n] for n in chosen]
    columns = [[_drawable(one.values[n]) for n in chosen] for one in present]
    finite = [v for column in columns for v in column if v is not None and math.isfinite(v)]
    y_axis = value_axis(finite, starts_at_zero=chart.starts_at_zero, is_seconds=chart.is_seconds)
    x_axis = step_axis(steps)
    rows = kept_rows(columns, len(steps))
    printed = chart.format_tick or decimals_for(y_axis)
    return filled(
        "line_chart.html",
        chart=chart,
        series=present,
        width=f"{_WIDTH:.0f}",
        height=f"{_HEIGHT:.0f}",
        y_words=[(number_of(100 * y_axis.share(tick)), printed(tick)) for tick in y_axis.ticks],
        x_words=_x_words(x_axis),
        described=_words(chart, present, columns, steps),
        grid_path="".join(f"M0 {_y(y_axis, tick)}H{_WIDTH:.0f}" for tick in y_axis.ticks),
        odd_path=_not_finite(columns, steps, x_axis),
        lines=[
            (one, *_line(one, column, rows, steps, x_axis, y_axis))
            for one, column in zip(present, columns, strict=True)
        ],
        hover=_hover(chart, present, columns, rows, steps, x_axis),
        remarks=_remarks(chart, columns, finite, y_axis),
        as_table=_table(chart, present, columns, steps),
    )


def _drawable(value: float | None) -> float | None:
    # Differences of larger numbers are not finite, and no chart can show them.
    return value if value is None or not abs(value) > _LARGEST else math.copysign(math.inf, value)


def _line(
    one: Series,
    column: Column,
    rows: Sequence[int],
    steps: Sequence[int],
    x_axis: Axis,
    y_axis: Axis,
) -> tuple[str, str]:
    """The paths of a line and of its points."""
    path, dots = "", ""
    is_broken = True
    for row in rows:
        value = column[row]
        if value is None:
            continue
        if not math.isfinite(value):
            is_broken = True
            continue
        at = f"{_x(x_axis, steps[row])} {_y(y_axis, value)}"
        path += f"{'M' if is_broken else 'L'}{at}"
        dots += f"M{at}h0"
        is_broken = False
    num_points = sum(value is not None for value in column)
    # Single points would be invisible as lines; few points are worth seeing one by one.
    return path, dots if num_points <= 60 and "faint" not in one.look else ""


def _not_finite(columns: Sequence[Column], steps: Sequence[int], axis: Axis) -> str:
    odd = _odd_steps(columns, steps)
    thinned = [odd[n] for n in evenly_spread(len(odd), _MOST_MARKS)]
    return "".join(f"M{_x(axis, step)} 0V{_HEIGHT:.0f}" for step in thinned)


def _odd_steps(columns: Sequence[Column], steps: Sequence[int]) -> list[int]:
    return [
        step
        for row, step in enumerate(steps)
        if any(c[row] is not None and not math.isfinite(c[row] or 0.0) for c in columns)
    ]


def _x(axis: Axis, step: float) -> str:
    return number_of(axis.share(step) * _WIDTH)


def _y(axis: Axis, value: float) -> str:
    # Far beyond the edge is beyond the edge: browsers draw no lines to 1e30.
    share = min(max(axis.share(value), -1.0), 2.0)
    return number_of((1 - share) * _HEIGHT)


def _x_words(axis: Axis) -> list[tuple[str, str, str]]:
    """Where each word stands, its class names, and the word."""
    words = []
    for number, tick in enumerate(axis.ticks):
        share = axis.share(tick)
        edge = "" if share < 1 - _EDGE_SHARE else " last"
        edge = " first" if share < _EDGE_SHARE and len(axis.ticks) > 1 else edge
        spare = " spare" if number % 2 and len(axis.ticks) > 4 else ""
        words.append((number_of(100 * share), f"{edge}{spare}", _step_words(tick, axis)))
    return words


def _step_words(step: float, axis: Axis) -> str:
    return f"{step:,.0f}" if axis.high < 1_000_000 else format_count(step)


def _words(
    chart: Chart, series: Sequence[Series], columns: Sequence[Column], steps: Sequence[int]
) -> str:
    said = [f"Over steps {steps[0]:,} to {steps[-1]:,}."]
    for one, column in zip(series, columns, strict=True):
        finite = [v for v in column if v is not None and math.isfinite(v)]
        if finite:
            first, last, low, high = (
                chart.format_value(v) for v in (finite[0], finite[-1], min(finite), max(finite))
            )
            said.append(f"{one.name}: first {first}, last {last}, lowest {low}, highest {high}.")
    return " ".join(said)


def _value(chart: Chart, value: float | None) -> str:
    if value is None:
        return "-"
    return chart.format_value(value) if math.isfinite(value) else str(value)


def _hover(
    chart: Chart,
    series: Sequence[Series],
    columns: Sequence[Column],
    rows: Sequence[int],
    steps: Sequence[int],
    axis: Axis,
) -> str:
    """What the script shows when a chart is pointed at; the same numbers as in the picture."""
    content = {
        "low": axis.low,
        "high": axis.high,
        "names": [one.name for one in series],
        "colours": [one.colour for one in series],
        "steps": [steps[row] for row in rows],
        "values": [
            [None if one[row] is None else _value(chart, one[row]) for one in columns]
            for row in rows
        ],
    }
    # A "<" in a name must not end the element.
    return as_markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))


def _remarks(chart: Chart, columns: Sequence[Column], finite: Sequence[float], axis: Axis) -> str:
    said = [chart.remark] if chart.remark else []
    num_odd = sum(v is not None and not math.isfinite(v) for column in columns for v in column)
    if num_odd:
        said.append(f"{num_odd:,} value(s) are not finite (NaN or infinite): vertical marks.")
    if axis.num_beyond:
        extreme = max(finite, key=lambda value: abs(value - (axis.low + axis.high) / 2))
        said.append(
            f"{axis.num_beyond:,} value(s) lie beyond the edge; the farthest is "
            f"{chart.format_value(extreme)}."
        )
    return " ".join(said)


def _table(
    chart: Chart, series: Sequence[Series], columns: Sequence[Column], steps: Sequence[int]
) -> Table:
    rows = evenly_spread(len(steps), _TABLE_ROWS)
    caption = chart.title
    if len(rows) < len(steps):
        caption += f", {len(rows)} of {len(steps):,} logged steps"
    cells = [[f"{steps[r]:,}", *(_value(chart, one[r]) for one in columns)] for r in rows]
    names = ["step", *(one.name for one in series)]
    return Table(caption=caption, columns=names, rows=cells)
