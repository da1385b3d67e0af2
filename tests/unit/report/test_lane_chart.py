"""The lane chart: valid, bounded, true to the trace."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.report import lane_chart_svg
from lohan.report.lane_chart import ticks
from lohan.report.palette import COLOUR_OF_KIND, colours_for, is_light
from lohan.trace import Counter, Span, Trace
from lohan.vocabulary import BlockId, ComputeKind, Lane, TensorKind, Tier

SVG = "{http://www.w3.org/2000/svg}"
LEFT_PX, RIGHT_PX = 148, 1280 - 28
LANE_HEIGHT_PX = 26


def span(lane: Lane, start: float, end: float, **more: object) -> Span:
    named = {"name": "work", **more}
    return Span(lane=lane, start_seconds=start, end_seconds=end, **named)  # type: ignore[arg-type]


def trace_of(*spans: Span, counters: tuple[Counter, ...] = (), name: str = "run") -> Trace:
    return Trace(name=name, is_simulated=True, spans=spans, counters=counters)


def parsed(text: str) -> ElementTree.Element:
    """Return the picture after the checks every chart must pass."""
    assert text.isascii()
    root = ElementTree.fromstring(text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert w >= 0
        assert x + w <= width + 1.01
        assert y + h <= height
    return root


def boxes(root: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    """Left edge and width of the boxes of a kind, legend left out."""
    return [
        (float(rect.attrib["x"]), float(rect.attrib["width"]))
        for rect in root.iter(f"{SVG}rect")
        if rect.attrib["fill"] == COLOUR_OF_KIND[kind] and rect.attrib["height"] != "12"
    ]


def words(root: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_a_span_lies_where_its_times_say() -> None:
    root = parsed(
        lane_chart_svg(trace_of(span(Lane.GPU, 0, 1, kind="forward"), span(Lane.CPU, 0, 4)))
    )
    ((x, width),) = boxes(root, "forward")
    assert x == LEFT_PX
    assert width == pytest.approx((RIGHT_PX - LEFT_PX) / 4, abs=1)


def test_every_lane_has_a_row_with_its_name_and_share() -> None:
    root = parsed(lane_chart_svg(trace_of(span(Lane.GPU, 0, 1), span(Lane.SSD_READ, 0, 4))))
    assert {"gpu", "25 % busy", "ssd_read", "100 % busy"} <= set(words(root))


def test_the_legend_names_the_kinds_that_are_there() -> None:
    root = parsed(
        lane_chart_svg(trace_of(span(Lane.GPU, 0, 1, kind="backward"), span(Lane.CPU, 0, 1)))
    )
    assert {"backward", "work"} <= set(words(root))
    assert "forward" not in words(root)


def test_a_block_number_is_written_where_it_fits() -> None:
    wide = span(Lane.GPU, 0, 1, name="a rather long name " * 20, block=BlockId(37))
    assert "37" in words(parsed(lane_chart_svg(trace_of(wide))))


def test_pointing_at_a_span_tells_its_story() -> None:
    move = span(Lane.SSD_READ, 0, 2, nbytes=14 * 10**9, waited_for="a slot")
    hints = [
        title.text or "" for title in parsed(lane_chart_svg(trace_of(move))).iter(f"{SVG}title")
    ]
    assert any("13.0 GiB at 7.0 GB/s" in hint and "waited for a slot" in hint for hint in hints)


def test_names_cannot_break_the_file() -> None:
    nasty = '<script>&"\x00\x1b\ud800 caf\u00e9'
    trace = trace_of(span(Lane.GPU, 0, 1, name=nasty, kind=nasty, waited_for=nasty), name=nasty)
    root = parsed(lane_chart_svg(trace))
    assert any("caf\u00e9" in text for text in words(root))


def test_long_names_and_facts_are_wrapped_within_the_picture() -> None:
    spans = (span(Lane.GPU, 0, 1),)
    facts = {f"fact {number}": "value " * 10 for number in range(9)}
    trace = Trace(name="a name " * 60, is_simulated=True, spans=spans, metadata=facts)
    found = words(parsed(lane_chart_svg(trace, width_px=800)))
    assert max(map(len, found)) < 800 / 6
    assert "fact 8" in " ".join(found)


def test_memory_shows_its_peak_and_its_budget() -> None:
    counter = Counter(
        tier=Tier.RAM, at_seconds=(0.0, 0.5), used_bytes=(1 << 30, 3 << 30), budget_bytes=4 << 30
    )
    root = parsed(lane_chart_svg(trace_of(span(Lane.GPU, 0, 1), counters=(counter,))))
    assert {"RAM in use", "peak 3.0 GiB", "budget 4.0 GiB"} <= set(words(root))
    assert [one for one in root.iter(f"{SVG}line") if "stroke-dasharray" in one.attrib]


def test_a_peak_shorter_than_a_pixel_is_still_seen() -> None:
    at = (0.0, 0.5, 0.5 + 1e-9, 0.5 + 2e-9, 0.5 + 3e-9)
    counter = Counter(tier=Tier.GPU, at_seconds=at, used_bytes=(10, 10, 1000, 20, 10))
    text = lane_chart_svg(trace_of(span(Lane.GPU, 0, 1), counters=(counter,)))
    (path,) = parsed(text).iter(f"{SVG}path")
    heights = [float(value) for value in re.findall(r"V([\d.]+)", path.attrib["d"])]
    assert max(heights) - min(heights) == pytest.approx(54, abs=0.1)
    assert heights[-2] == pytest.approx(max(heights) - 0.54, abs=0.1)


def test_a_hundred_thousand_spans_make_a_small_file_with_true_shares() -> None:
    # Busy a quarter of the time, in spans far below a pixel.
    spans = tuple(
        span(Lane.GPU, number * 0.01, number * 0.01 + 0.0025, kind="forward")
        for number in range(100_000)
    )
    text = lane_chart_svg(trace_of(*spans))
    assert len(text) < 200_000
    (path,) = parsed(text).iter(f"{SVG}path")
    area = 0.0
    for left, high, right, low in re.findall(
        r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)", path.attrib["d"]
    ):
        area += (float(right) - float(left)) * (float(low) - float(high))
    assert area == pytest.approx(0.25 * LANE_HEIGHT_PX * (RIGHT_PX - LEFT_PX), rel=0.01)


def test_a_few_narrow_spans_among_wide_ones_leave_faint_marks() -> None:
    spans = [span(Lane.GPU, 0, 500, kind="backward")]
    spans += [span(Lane.GPU, 600 + n * 100, 600 + n * 100 + 0.1, kind="norm") for n in range(4)]
    spans += [span(Lane.GPU, 1000, 1000, kind="reduce")]
    root = parsed(lane_chart_svg(trace_of(*spans)))
    assert [round(width) for _, width in boxes(root, "norm")] == [1, 1, 1, 1]
    assert len(boxes(root, "reduce")) == 1


def test_several_traces_share_one_axis_and_each_is_judged_by_its_own_length() -> None:
    predicted = trace_of(span(Lane.GPU, 0, 1, kind="forward"), name="predicted")
    measured = trace_of(span(Lane.GPU, 0, 2, kind="forward"), name="measured")
    root = parsed(lane_chart_svg(predicted, measured))
    widths = [width for _, width in boxes(root, "forward")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=1)
    assert words(root).count("100 % busy") == 2


def test_a_window_shows_its_part_only() -> None:
    spans = (span(Lane.GPU, 0, 1, kind="forward"), span(Lane.GPU, 1, 3, kind="backward"))
    root = parsed(lane_chart_svg(trace_of(*spans), start_seconds=1.5, end_seconds=2.5))
    assert boxes(root, "forward") == []
    ((x, width),) = boxes(root, "backward")
    assert (x, round(width)) == (LEFT_PX, RIGHT_PX - LEFT_PX - 1)


def test_requests_in_flight_together_are_drawn_below_each_other() -> None:
    spans = (span(Lane.SSD_READ, 0, 2, kind="P16"), span(Lane.SSD_READ, 1, 3, kind="P16"))
    root = parsed(lane_chart_svg(trace_of(*spans)))
    tops = {
        rect.attrib["y"]
        for rect in root.iter(f"{SVG}rect")
        if rect.attrib["fill"] == COLOUR_OF_KIND["P16"] and rect.attrib["height"] == "13"
    }
    assert len(tops) == 2


@pytest.mark.parametrize("traces", [(), (trace_of(),), (trace_of(span(Lane.GPU, 0, 5e-324)),)])
def test_nothing_to_draw_is_still_a_picture(traces: tuple[Trace, ...]) -> None:
    parsed(lane_chart_svg(*traces))


def test_the_same_trace_gives_the_same_file() -> None:
    trace = trace_of(*(span(Lane.GPU, n, n + 1, kind=str(n)) for n in range(20)))
    assert lane_chart_svg(trace) == lane_chart_svg(trace)


def test_every_kind_of_the_vocabulary_has_its_own_colour() -> None:
    assert {*ComputeKind, *TensorKind} == set(COLOUR_OF_KIND)
    assert len(set(COLOUR_OF_KIND.values())) == len(COLOUR_OF_KIND)
    assert list(colours_for(["zeta", "A16", "alpha", "forward"])) == [
        "forward",
        "A16",
        "alpha",
        "zeta",
    ]


def test_text_on_a_colour_is_dark_or_light_as_it_reads_better() -> None:
    assert is_light("#ffffff")
    assert not is_light("#000000")
    assert is_light(COLOUR_OF_KIND[ComputeKind.RECOMPUTE])
    assert is_light(COLOUR_OF_KIND[TensorKind.OS32])
    assert not is_light(COLOUR_OF_KIND[ComputeKind.FORWARD])


@pytest.mark.parametrize(
    ("start", "end", "first", "last", "count"),
    [
        (0, 10, "0 s", "10 s", 11),
        (0, 25.8, "0 s", "25 s", 6),
        (0, 0.004, "0.0 ms", "4.0 ms", 9),
        (0, 3e-6, "0.0 us", "3.0 us", 7),
        (99.5, 100.5, "99.5 s", "100.5 s", 11),
        (0, 86400, "0 s", "80000 s", 9),
    ],
)
def test_ticks_are_round_times_with_a_fitting_unit(
    start: float, end: float, first: str, last: str, count: int
) -> None:
    found = ticks(start, end)
    assert (found[0][1], found[-1][1], len(found)) == (first, last, count)


TIMES = st.floats(0, 1e6, allow_nan=False)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(Lane), TIMES, TIMES), max_size=30),
    st.lists(TIMES, max_size=10),
)
def test_any_trace_can_be_drawn(pieces: list[tuple[Lane, float, float]], at: list[float]) -> None:
    spans = [span(lane, min(a, b), max(a, b)) for lane, a, b in pieces]
    used = tuple(range(len(at)))
    counter = Counter(tier=Tier.SSD, at_seconds=tuple(sorted(at)), used_bytes=used)
    parsed(lane_chart_svg(trace_of(*spans, counters=(counter,))))
