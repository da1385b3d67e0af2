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
    drawing = _Drawing(
        chart=chart,
        series=present,
        columns=columns,
        steps=steps,
        rows=kept_rows(columns, len(steps)),
        x_axis=step_axis(steps),
        y_axis=y_axis,
    )
    printed = chart.format_tick or decimals_for(y_axis)
    return filled(
        "line_chart.html",
        chart=chart,
        series=present,
        width=f"{_WIDTH:.0f}",
        height=f"{_HEIGHT:.0f}",
        y_words=[(number_of(100 * y_axis.share(tick)), printed(tick)) for tick in y_axis.ticks],
        x_words=_x_words(drawing.x_axis),
        described=drawing.words(),
        grid_path="".join(f"M0 {drawing.y(tick)}H{_WIDTH:.0f}" for tick in y_axis.ticks),
        odd_path=drawing.not_finite(),
        lines=[
            (one, *drawing.line(one, column)) for one, column in zip(present, columns, strict=True)
        ],
        hover=drawing.hover(),
        remarks=drawing.remarks(finite),
        as_table=drawing.table(),
    )


def _drawable(value: float | None) -> float | None:
    # Differences of larger numbers are not finite, and no chart can show them.
    return value if value is None or not abs(value) > _LARGEST else math.copysign(math.inf, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """A chart with its numbers as they are drawn: series that have some, a value per step."""

    chart: Chart
    series: Sequence[Series]
    columns: Sequence[Column]
    steps: Sequence[int]
    rows: Sequence[int]
    """Which of the steps are drawn as points of a line."""
    x_axis: Axis
    y_axis: Axis

    def x(self, step: float) -> str:
        return number_of(self.x_axis.share(step) * _WIDTH)

    def y(self, value: float) -> str:
        # Far beyond the edge is beyond the edge: browsers draw no lines to 1e30.
        share = min(max(self.y_axis.share(value), -1.0), 2.0)
        return number_of((1 - share) * _HEIGHT)

    def line(self, one: Series, column: Column) -> tuple[str, str]:
        """The paths of a line and of its points."""
        path, dots = "", ""
        is_broken = True
        for row in self.rows:
            value = column[row]
            if value is None:
                continue
            if not math.isfinite(value):
                is_broken = True
                continue
            at = f"{self.x(self.steps[row])} {self.y(value)}"
            path += f"{'M' if is_broken else 'L'}{at}"
            dots += f"M{at}h0"
            is_broken = False
        num_points = sum(value is not None for value in column)
        # Single points would be invisible as lines; few points are worth seeing one by one.
        return path, dots if num_points <= 60 and "faint" not in one.look else ""

    def not_finite(self) -> str:
        odd = [
            step
            for row, step in enumerate(self.steps)
            if any(c[row] is not None and not math.isfinite(c[row] or 0.0) for c in self.columns)
        ]
        thinned = [odd[n] for n in evenly_spread(len(odd), _MOST_MARKS)]
        return "".join(f"M{self.x(step)} 0V{_HEIGHT:.0f}" for step in thinned)

    def words(self) -> str:
        said = [f"Over steps {self.steps[0]:,} to {self.steps[-1]:,}."]
        for one, column in zip(self.series, self.columns, strict=True):
            finite = [v for v in column if v is not None and math.isfinite(v)]
            if finite:
                first, last, low, high = (
                    self.chart.format_value(v)
                    for v in (finite[0], finite[-1], min(finite), max(finite))
                )
                said.append(
                    f"{one.name}: first {first}, last {last}, lowest {low}, highest {high}."
                )
        return " ".join(said)

    def value(self, value: float | None) -> str:
        if value is None:
            return "-"
        return self.chart.format_value(value) if math.isfinite(value) else str(value)

    def hover(self) -> str:
        """What the script shows when a chart is pointed at; the same numbers as in the picture."""
        content = {
            "low": self.x_axis.low,
            "high": self.x_axis.high,
            "names": [one.name for one in self.series],
            "colours": [one.colour for one in self.series],
            "steps": [self.steps[row] for row in self.rows],
            "values": [
                [None if one[row] is None else self.value(one[row]) for one in self.columns]
                for row in self.rows
            ],
        }
        # A "<" in a name must not end the element.
        return as_markup(json.dumps(content, separators=(",", ":")).replace("<", "\\u003c"))

    def remarks(self, finite: Sequence[float]) -> str:
        chart, axis = self.chart, self.y_axis
        said = [chart.remark] if chart.remark else []
        num_odd = sum(v is not None and not math.isfinite(v) for c in self.columns for v in c)
        if num_odd:
            said.append(f"{num_odd:,} value(s) are not finite (NaN or infinite): vertical marks.")
        if axis.num_beyond:
            extreme = max(finite, key=lambda value: abs(value - (axis.low + axis.high) / 2))
            said.append(
                f"{axis.num_beyond:,} value(s) lie beyond the edge; the farthest is "
                f"{chart.format_value(extreme)}."
            )
        return " ".join(said)

    def table(self) -> Table:
        rows = evenly_spread(len(self.steps), _TABLE_ROWS)
        caption = self.chart.title
        if len(rows) < len(self.steps):
            caption += f", {len(rows)} of {len(self.steps):,} logged steps"
        cells = [[f"{self.steps[r]:,}", *(self.value(c[r]) for c in self.columns)] for r in rows]
        names = ["step", *(one.name for one in self.series)]
        return Table(caption=caption, columns=names, rows=cells)


def _x_words(axis: Axis) -> list[tuple[str, str, str]]:
    """Where each word stands, its class names, and the word."""
    words = []
    for number, tick in enumerate(axis.ticks):
        share = axis.share(tick)
        edge = "" if share < 1 - _EDGE_SHARE else " last"
        edge = " first" if share < _EDGE_SHARE and len(axis.ticks) > 1 else edge
        spare = " spare" if number % 2 and len(axis.ticks) > 4 else ""
        spelt = f"{tick:,.0f}" if axis.high < 1_000_000 else format_count(tick)
        words.append((number_of(100 * share), f"{edge}{spare}", spelt))
    return words
