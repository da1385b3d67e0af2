"""Axes, thinning and line charts: what stands out is seen, whatever the numbers are."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.report.html.axis import decimals_for, round_step, scientific, step_axis, value_axis
from lohan.report.html.line_chart import Chart, Series, line_chart
from lohan.report.html.thinning import evenly_spread, kept_rows, running_mean
from lohan.report.sections.memory import BarPiece, Mark, stacked_bar

any_float = st.floats(
    width=64, allow_nan=False, allow_infinity=False, min_value=-1e99, max_value=1e99
)


def chart_of(*columns: list[float | None], steps: list[int] | None = None, **more: object) -> str:
    series = tuple(
        Series(name=f"line {n}", values=values, colour=n + 1) for n, values in enumerate(columns)
    )
    return line_chart(
        Chart(
            anchor="c",
            title="A chart",
            steps=steps or list(range(1, len(columns[0]) + 1)),
            series=series,
            format_value=str,
            **more,  # type: ignore[arg-type]
        )
    )


def points(html: str) -> list[tuple[float, float]]:
    """Points of the first line, as shares of width and height (from below)."""
    path = re.search(r'<path class="line[^"]*" d="([^"]*)"', html)
    assert path is not None
    return [
        (float(x) / 1000, 1 - float(y) / 300)
        for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path[1])
    ]


@given(st.lists(any_float, min_size=1, max_size=50), st.booleans(), st.booleans())
def test_an_axis_holds_its_values_and_its_ticks(
    values: list[float], starts_at_zero: bool, is_seconds: bool
) -> None:
    axis = value_axis(values, starts_at_zero=starts_at_zero, is_seconds=is_seconds)
    assert axis.low < axis.high
    assert 1 <= len(axis.ticks) <= 13
    inside = [value for value in values if axis.low <= value <= axis.high]
    assert len(inside) == len(values) - axis.num_beyond
    assert axis.num_beyond <= 0.05 * len(values)
    printed = [decimals_for(axis)(tick) for tick in axis.ticks]
    assert all(len(words) < 16 for words in printed)


def test_a_slow_first_step_does_not_flatten_the_rest() -> None:
    axis = value_axis([100.0] + [2.0 + 0.01 * (n % 7) for n in range(99)], starts_at_zero=True)
    assert axis.high < 5
    assert axis.num_beyond == 1


def test_ticks_tell_values_apart() -> None:
    axis = value_axis([2.31, 2.34], starts_at_zero=False)
    printed = [decimals_for(axis)(tick) for tick in axis.ticks]
    assert len(set(printed)) == len(printed)
    assert scientific(2e-4) == "2e-4"
    assert scientific(0) == "0"
    assert round_step(0.3) == 0.5
    assert round_step(290, is_seconds=True) == 300


def test_the_step_axis_names_both_ends_where_there_is_room() -> None:
    assert step_axis([1, 1000]).ticks == (1, 200, 400, 600, 800, 1000)
    assert step_axis([7]).ticks == (7,)
    assert step_axis([1, 2]).ticks == (1, 2)


@given(
    st.integers(601, 5000),
    st.lists(st.tuples(st.integers(0, 4999), any_float | st.just(math.nan)), max_size=20),
)
@settings(max_examples=30)
def test_thinning_keeps_the_ends_and_everything_that_stands_out(
    num_rows: int, peaks: list[tuple[int, float]]
) -> None:
    column: list[float | None] = [0.5 if row % 3 else None for row in range(num_rows)]
    for row, value in peaks:
        column[row % num_rows] = value
    kept = kept_rows([column], num_rows)
    assert kept == sorted(set(kept))
    assert {0, num_rows - 1} <= set(kept)
    values = [column[row] for row in kept]
    finite = [v for v in column if v is not None and math.isfinite(v)]
    assert max(finite) in values
    assert min(finite) in values
    assert any(v is not None and math.isnan(v) for v in values) == any(
        v is not None and math.isnan(v) for v in column
    )
    assert len(kept) <= 3100


def test_few_rows_are_all_kept() -> None:
    assert kept_rows([[1.0] * 600], 600) == list(range(600))
    assert evenly_spread(3, 40) == [0, 1, 2]
    assert evenly_spread(1000, 40)[0] == 0
    assert evenly_spread(1000, 40)[-1] == 999
    assert len(evenly_spread(1000, 40)) == 40


def test_the_running_mean_leaves_out_what_is_not_finite() -> None:
    assert running_mean([1.0, None, math.nan, 2.0, 6.0, 4.0], 3) == [1.5, None, None, 3.0, 4.0, 5.0]


def test_points_lie_where_their_numbers_say() -> None:
    found = points(chart_of([0.0, 5.0, 10.0], steps=[10, 20, 30]))
    assert found == [(0, 0), (0.5, 0.5), (1, 1)]


def test_what_is_not_finite_breaks_the_line_and_is_marked_and_counted() -> None:
    html = chart_of([1.0, 2.0, math.nan, 3.0, math.inf])
    assert re.findall(r'class="line[^"]*" d="([^"]*)"', html)[0].count("M") == 2
    assert re.findall(r'class=odd d="([^"]*)"', html)[0].count("M") == 2
    assert "2 value(s) are not finite" in html
    assert "<td class=number>nan</td>" in html


def test_values_too_large_to_draw_are_marked_too() -> None:
    html = chart_of([1.0, 1e308, -1e308, 2.0])
    assert "2 value(s) are not finite" in html


def test_missing_values_do_not_break_the_line() -> None:
    html = chart_of([1.0, None, 3.0], [None, None, None])
    assert re.findall(r'class="line[^"]*" d="([^"]*)"', html)[0].count("M") == 1
    assert "line 1" not in html


def test_no_numbers_make_no_chart() -> None:
    assert chart_of([None, None]) == ""
    assert chart_of([]) == ""


def test_only_values_that_are_not_finite_still_make_a_chart() -> None:
    assert "2 value(s) are not finite" in chart_of([math.nan, math.nan])


def test_names_cannot_break_out_of_the_page() -> None:
    nasty = "</script><script>alert(1)</script>\"'&"
    html = line_chart(
        Chart(
            anchor="c",
            title=nasty,
            steps=[1, 2],
            series=(
                Series(name=nasty, values=[1.0, 2.0], colour=1),
                Series(name=nasty, values=[1.0, 2.0], colour=2),
            ),
            format_value=lambda value: nasty,
            format_tick=lambda value: nasty,
        )
    )
    assert "<script>" not in html
    assert html.count("</script>") == 1
    held = re.search(r'<script type="application/json">(.*?)</script>', html)
    assert held is not None
    assert json.loads(held[1])["names"] == [nasty, nasty]


@given(st.lists(st.none() | st.floats(), min_size=1, max_size=40))
@settings(max_examples=60)
def test_any_numbers_make_a_sound_picture(values: list[float | None]) -> None:
    html = chart_of(values)
    if html:
        svg = re.search(r"<svg.*?</svg>", html, re.DOTALL)
        assert svg is not None
        quoted = re.sub(r"class=([a-z]+)", r'class="\1"', svg[0])
        ElementTree.fromstring(quoted)
        assert "nan" not in svg[0].partition("</desc>")[2]


def test_a_bar_is_as_long_as_its_bytes_and_shows_its_marks() -> None:
    html = stacked_bar(
        "ram",
        [
            BarPiece(nbytes=30, colour=1, hint="a: 30 B"),
            BarPiece(nbytes=10, colour=2, hint="<b>: 10 B"),
        ],
        [Mark(look="budget", nbytes=80, hint="allowed: 80 B")],
    )
    widths = [float(w) for w in re.findall(r'class="c\d" x="[\d.]+%" y="4" width="([\d.]+)%', html)]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.05)
    assert 'x1="99%"' in html
    assert "<b>" not in html
    assert "a: 30 B. &lt;b&gt;: 10 B. allowed: 80 B." in html


def test_a_bar_of_nothing_is_a_bar() -> None:
    assert "<svg" in stacked_bar("ram", [], [])
