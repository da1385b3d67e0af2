"""Lane chart: a trace as a picture. Lanes are rows over time, memory curves lie below.

Owns the geometry. Legible from one span to hundreds of thousands: what is narrower than a pixel is
merged into the pixel it falls on, and a lane of mostly such spans becomes an area whose height is
the share of time it was busy, so a file never grows beyond the width of its picture. Called by
`lohan simulate --svg` and by reports.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence

from lohan.report import svg
from lohan.report.memory_curve import MEMORY_HEIGHT_PX, memory_shapes
from lohan.report.palette import colours_for, is_light
from lohan.report.window import Window, axis_shapes
from lohan.trace import Span, Trace, summarise
from lohan.trace.rows import Row, rows_of
from lohan.units import format_bytes, format_rate, format_seconds

_EDGE, _LEFT, _RIGHT, _TOP = 24.0, 148.0, 28.0, 24.0
_LANE_HEIGHT, _LANE_GAP = 26.0, 7.0
_MEMORY_GAP = 14.0
_LETTER_PX = 6.2  # width of a letter at the size used inside spans, on the wide side
_OPACITY_STEPS = 8
# A lane is drawn as shares when more than this many spans, and more than half, are this narrow.
_DENSE_SPANS, _DENSE_PX = 150, 1.5
_DENSE_BIN_PX = 4
_MIN_WIDTH_PX = 400
_SHORTEST_SECONDS = 1e-9  # what is shorter has no axis


def lane_chart_svg(
    *traces: Trace,
    start_seconds: float | None = None,
    end_seconds: float | None = None,
    width_px: int = 1280,
) -> str:
    """Return a self-contained SVG of one or more traces over the same time axis.

    Several traces, such as a predicted and a measured one, stand one above the other.
    """
    start = start_seconds
    if start is None:
        start = min((trace.start_seconds for trace in traces), default=0.0)
    end = end_seconds
    if end is None:
        end = max((trace.end_seconds for trace in traces), default=0.0)
    if not end - start >= _SHORTEST_SECONDS:
        end = start + 1.0
    width = float(max(width_px, _MIN_WIDTH_PX))
    window = Window(start_seconds=start, end_seconds=end, left_px=_LEFT, right_px=width - _RIGHT)
    colours = colours_for(
        span.group for trace in traces for span in trace.spans if _is_shown(span, window)
    )
    shapes, y = _legend(colours, window, _TOP)
    for trace in traces:
        drawn, y = _section(trace, window, colours, y)
        shapes += drawn
    title = " and ".join(trace.name for trace in traces) or "no traces"
    return svg.document(width, y + 8, title, shapes)


def _is_shown(span: Span, window: Window) -> bool:
    return span.end_seconds >= window.start_seconds and span.start_seconds <= window.end_seconds


def _legend(colours: Mapping[str, str], window: Window, y: float) -> tuple[list[str], float]:
    shapes = []
    x = window.left_px
    for kind, colour in colours.items():
        width = 26 + len(kind) * 7.2
        if x + width > window.right_px and x > window.left_px:
            x, y = window.left_px, y + 20
        shapes.append(svg.box(x, y - 10, 12, 12, colour=colour, radius=2))
        shapes.append(svg.label(x + 17, y, kind))
        x += width
    return shapes, y + (12 if colours else 0)


def _section(
    trace: Trace, window: Window, colours: Mapping[str, str], y: float
) -> tuple[list[str], float]:
    source = "simulated" if trace.is_simulated else "measured"
    # A trace that is shorter than the axis is judged by its own length.
    summary = summarise(
        trace,
        start_seconds=max(window.start_seconds, trace.start_seconds),
        end_seconds=min(window.end_seconds, trace.end_seconds),
    )
    rows = rows_of(trace)
    facts = [f"{source}, {format_seconds(summary.seconds)}"]
    facts += [f"{key} {value}" for key, value in trace.metadata.items()]
    if any(_is_dense(row.spans, window) for row in rows):
        facts.append("height is the share of time busy where spans are too short to draw")
    y += 24
    shapes = []
    for words in _wrapped(trace.name, window, letter_px=9.5):
        shapes.append(svg.label(_EDGE, y, words, font_px=16, weight=600))
        y += 18
    for words in _wrapped(", ".join(facts), window, letter_px=6.8):
        shapes.append(svg.label(_EDGE, y, words, colour=svg.MUTED))
        y += 16
    top = y
    lanes: list[str] = []
    y = top
    for row in rows:
        lane = summary.lane(row.label)
        share = lane.busy_share if lane else 0.0
        lanes.append(svg.label(_EDGE, y + 10.5, row.label, weight=600))
        lanes.append(
            svg.label(_EDGE, y + 23.5, f"{100 * share:.0f} % busy", font_px=10, colour=svg.MUTED)
        )
        width = window.right_px - window.left_px
        lanes.append(svg.box(window.left_px, y, width, _LANE_HEIGHT, colour=svg.TRACK))
        lanes += _row(row, window, colours, y)
        y += _LANE_HEIGHT + _LANE_GAP
    memory: list[str] = []
    if trace.counters:
        y += 10
    has_ranks = len({counter.rank for counter in trace.counters}) > 1
    for counter in trace.counters:
        name = f"{counter.tier} {counter.rank}" if has_ranks else str(counter.tier)
        memory += memory_shapes(counter, name, window, y)
        y += MEMORY_HEIGHT_PX + _MEMORY_GAP
    axis = axis_shapes(window, top, y)
    # Grid lines first: they run behind the spans.
    return shapes + axis + lanes + memory, y + 22


def _wrapped(words: str, window: Window, *, letter_px: float) -> list[str]:
    return textwrap.wrap(words, width=int((window.right_px - _EDGE) / letter_px))


def _is_dense(spans: Sequence[Span], window: Window) -> bool:
    shown = [span for span in spans if _is_shown(span, window)]
    num_narrow = sum(span.seconds * window.px_per_second < _DENSE_PX for span in shown)
    return num_narrow > _DENSE_SPANS and num_narrow * 2 > len(shown)


def _row(row: Row, window: Window, colours: Mapping[str, str], y: float) -> list[str]:
    if _is_dense(row.spans, window):
        return _shares(row.spans, window, colours, y)
    parts = row.without_overlap()
    height = _LANE_HEIGHT / max(1, len(parts))
    shapes = []
    for number, spans in enumerate(parts):
        shown = [span for span in spans if _is_shown(span, window)]
        shapes += _line_of_spans(shown, window, colours, y + number * height, height)
    return shapes


def _shares(
    spans: Sequence[Span], window: Window, colours: Mapping[str, str], y: float
) -> list[str]:
    """Draw one area per kind, stacked: how much of each few pixels of time the kind took."""
    num_bins = math.ceil((window.right_px - window.left_px) / _DENSE_BIN_PX)
    px_by_kind = {kind: [0.0] * num_bins for kind in colours}
    for span in spans:
        if not _is_shown(span, window):
            continue
        left = window.x(span.start_seconds) - window.left_px
        right = window.x(span.end_seconds) - window.left_px
        last = min(num_bins - 1, int(right / _DENSE_BIN_PX))
        for index in range(min(num_bins - 1, int(left / _DENSE_BIN_PX)), last + 1):
            start = index * _DENSE_BIN_PX
            covered = min(right, start + _DENSE_BIN_PX) - max(left, start)
            px_by_kind[span.group][index] += max(0.0, covered)
    shapes = []
    below = [0.0] * num_bins  # share of the height already taken, bin by bin
    for kind, px in px_by_kind.items():
        # Requests in flight together may add up to more than the time there is.
        above = [min(1.0, low + own / _DENSE_BIN_PX) for low, own in zip(below, px, strict=True)]
        if above != below:
            shapes.append(_area(below, above, window, colours[kind], y))
        below = above
    return shapes


def _area(
    below: Sequence[float], above: Sequence[float], window: Window, colour: str, y: float
) -> str:
    """Draw the area between two stepped lines, given as shares of a lane's height."""
    bottom = y + _LANE_HEIGHT
    path = ""
    index = 0
    while index < len(above):
        end = index + 1
        while end < len(above) and (below[end], above[end]) == (below[index], above[index]):
            end += 1
        if above[index] > below[index]:
            left = window.left_px + index * _DENSE_BIN_PX
            right = min(window.left_px + end * _DENSE_BIN_PX, window.right_px)
            low, high = (bottom - share * _LANE_HEIGHT for share in (below[index], above[index]))
            corners = (svg.number_of(value) for value in (left, high, right, low, left))
            path += "M{} {}H{}V{}H{}Z".format(*corners)
        index = end
    return f'<path d="{path}" fill="{colour}"/>'


def _line_of_spans(
    spans: Sequence[Span],
    window: Window,
    colours: Mapping[str, str],
    y: float,
    height: float,
) -> list[str]:
    """Draw spans that do not overlap; what is narrower than a pixel goes into pixel columns."""
    shapes = []
    px_by_column: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        left, right = window.x(span.start_seconds), window.x(span.end_seconds)
        if right - left >= 1:
            shapes.append(_wide_span(span, left, right, colours[span.group], y, height))
            continue
        # A span may lie across two columns; one without length still leaves a faint mark.
        for column in range(math.floor(left), math.floor(right) + 1):
            px_by_column[column][span.group] += min(right, column + 1) - max(left, column)
    return _merged_columns(px_by_column, colours, y, height) + shapes


def _wide_span(span: Span, left: float, right: float, colour: str, y: float, height: float) -> str:
    width = right - left
    # A hair of a gap keeps neighbours of one colour apart where there is room for it.
    gap = 0.6 if width >= 3 else 0.0
    radius = 1.5 if width >= 8 else 0.0
    hint = _hint(span) if width >= 2 else ""
    shape = svg.box(left, y, width - gap, height, colour=colour, radius=radius, hint=hint)
    words = span.name if len(span.name) * _LETTER_PX <= width - 6 else _short_name(span)
    # Room for two digits: a row in which only the blocks below 10 are numbered looks broken.
    if height >= 14 and words and max(2, len(words)) * _LETTER_PX <= width - 4:
        ink = svg.INK_ON_COLOUR if is_light(colour) else "#ffffff"
        middle = (left + right - gap) / 2
        baseline = y + height / 2 + 3.8
        shape += svg.label(middle, baseline, words, font_px=10.5, colour=ink, anchor="middle")
    return shape


def _short_name(span: Span) -> str:
    return str(span.block) if span.block is not None else ""


def _hint(span: Span) -> str:
    lines = [
        span.name,
        f"{format_seconds(span.seconds)}, from {format_seconds(span.start_seconds)}",
    ]
    if span.nbytes:
        rate = f" at {format_rate(span.nbytes / span.seconds)}" if span.seconds > 0 else ""
        lines.append(f"{format_bytes(span.nbytes)}{rate}")
    if span.waited_for:
        lines.append(f"waited for {span.waited_for}")
    return "\n".join(lines)


def _merged_columns(
    px_by_column: Mapping[int, Mapping[str, float]],
    colours: Mapping[str, str],
    y: float,
    height: float,
) -> list[str]:
    """Draw pixel columns in the colour that fills most of each, as dense as they are filled."""
    shapes: list[str] = []
    run: tuple[int, int, str, int] | None = None  # first column, end, kind, density
    for column in sorted(px_by_column):
        kinds = px_by_column[column]
        kind = max(sorted(kinds), key=lambda name: kinds[name])
        density = max(1, round(min(1.0, sum(kinds.values())) * _OPACITY_STEPS))
        if run and run[1:] == (column, kind, density):
            run = (run[0], column + 1, kind, density)
            continue
        if run:
            shapes.append(_column_box(run, colours, y, height))
        run = (column, column + 1, kind, density)
    if run:
        shapes.append(_column_box(run, colours, y, height))
    return shapes


def _column_box(
    run: tuple[int, int, str, int], colours: Mapping[str, str], y: float, height: float
) -> str:
    first, end, kind, density = run
    opacity = density / _OPACITY_STEPS
    return svg.box(first, y, end - first, height, colour=colours[kind], opacity=opacity)
