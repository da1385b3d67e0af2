"""Lane chart: a trace as a picture. Lanes are rows over time, memory curves lie below.

Owns the geometry. Legible from one span to hundreds of thousands: what is narrower than a pixel is
merged into the pixel it falls on, and a lane of mostly such spans becomes an area whose height is
the share of time it was busy, so a file never grows beyond the width of its picture. The peak of a
memory curve is always seen, however short it was. Called by `lohan simulate --svg` and by reports.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lohan.report import svg
from lohan.report.html.axis import round_step
from lohan.report.palette import colours_for, is_light
from lohan.trace import Counter, Span, Trace, summarise
from lohan.trace.rows import Row, rows_of
from lohan.units import format_bytes, format_rate, format_seconds

_EDGE, _LEFT, _RIGHT, _TOP = 24.0, 148.0, 28.0, 24.0
_LANE_HEIGHT, _LANE_GAP = 26.0, 7.0
_MEMORY_HEIGHT, _MEMORY_GAP = 58.0, 14.0
_MEMORY_COLOUR = "#5d7fa3"
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
    colours = colours_for(
        span.group
        for trace in traces
        for span in trace.spans
        if span.end_seconds >= start and span.start_seconds <= end
    )
    chart = _Chart(start_seconds=start, end_seconds=end, right_px=width - _RIGHT, colours=colours)
    shapes, y = chart.legend(_TOP)
    for trace in traces:
        drawn, y = chart.section(trace, y)
        shapes += drawn
    title = " and ".join(trace.name for trace in traces) or "no traces"
    return svg.document(width, y + 8, title, shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    """The stretch of time that is shown, where it lies in the picture, and colours by kind."""

    start_seconds: float
    end_seconds: float
    right_px: float
    colours: Mapping[str, str]

    @property
    def px_per_second(self) -> float:
        """Scale of the picture."""
        return (self.right_px - _LEFT) / (self.end_seconds - self.start_seconds)

    def x(self, seconds: float) -> float:
        """Return where a time lies; times outside the window lie on its edge."""
        inside = min(max(seconds, self.start_seconds), self.end_seconds)
        return _LEFT + (inside - self.start_seconds) * self.px_per_second

    def shown(self, spans: Sequence[Span]) -> list[Span]:
        """Those of the spans that lie in the window."""
        start, end = self.start_seconds, self.end_seconds
        return [one for one in spans if one.end_seconds >= start and one.start_seconds <= end]

    def legend(self, y: float) -> tuple[list[str], float]:
        """Draw the colours of kinds from `y` on; returns where it ends, too."""
        shapes = []
        x = _LEFT
        for kind, colour in self.colours.items():
            width = 26 + len(kind) * 7.2
            if x + width > self.right_px and x > _LEFT:
                x, y = _LEFT, y + 20
            shapes.append(svg.box(x, y - 10, 12, 12, colour=colour, radius=2))
            shapes.append(svg.label(x + 17, y, kind))
            x += width
        return shapes, y + (12 if self.colours else 0)

    def section(self, trace: Trace, y: float) -> tuple[list[str], float]:
        """Draw one trace from `y` on; returns where it ends, too."""
        source = "simulated" if trace.is_simulated else "measured"
        # A trace that is shorter than the axis is judged by its own length.
        summary = summarise(
            trace,
            start_seconds=max(self.start_seconds, trace.start_seconds),
            end_seconds=min(self.end_seconds, trace.end_seconds),
        )
        rows = rows_of(trace)
        facts = [f"{source}, {format_seconds(summary.seconds)}"]
        facts += [f"{key} {value}" for key, value in trace.metadata.items()]
        if any(self._is_dense(row.spans) for row in rows):
            facts.append("height is the share of time busy where spans are too short to draw")
        y += 24
        shapes = []
        for words in self._wrapped(trace.name, letter_px=9.5):
            shapes.append(svg.label(_EDGE, y, words, font_px=16, weight=600))
            y += 18
        for words in self._wrapped(", ".join(facts), letter_px=6.8):
            shapes.append(svg.label(_EDGE, y, words, colour=svg.MUTED))
            y += 16
        top = y
        lanes: list[str] = []
        for row in rows:
            lane = summary.lane(row.label)
            share = lane.busy_share if lane else 0.0
            lanes.append(svg.label(_EDGE, y + 10.5, row.label, weight=600))
            lanes.append(
                svg.label(
                    _EDGE, y + 23.5, f"{100 * share:.0f} % busy", font_px=10, colour=svg.MUTED
                )
            )
            width = self.right_px - _LEFT
            lanes.append(svg.box(_LEFT, y, width, _LANE_HEIGHT, colour=svg.TRACK))
            lanes += self._row(row, y)
            y += _LANE_HEIGHT + _LANE_GAP
        memory: list[str] = []
        if trace.counters:
            y += 10
        has_ranks = len({counter.rank for counter in trace.counters}) > 1
        for counter in trace.counters:
            name = f"{counter.tier} {counter.rank}" if has_ranks else str(counter.tier)
            memory += self._memory(counter, name, y)
            y += _MEMORY_HEIGHT + _MEMORY_GAP
        axis = self._axis(top, y)
        # Grid lines first: they run behind the spans.
        return shapes + axis + lanes + memory, y + 22

    def _wrapped(self, words: str, *, letter_px: float) -> list[str]:
        return textwrap.wrap(words, width=int((self.right_px - _EDGE) / letter_px))

    def _axis(self, top: float, bottom: float) -> list[str]:
        """Draw grid lines from `top` to `bottom`, with the times below them."""
        shapes = []
        for at_seconds, words in ticks(self.start_seconds, self.end_seconds):
            x = self.x(at_seconds)
            shapes.append(svg.line(x, top - 4, x, bottom, colour=svg.GRID))
            shapes.append(
                svg.label(x, bottom + 14, words, font_px=10.5, colour=svg.MUTED, anchor="middle")
            )
        return shapes

    def _is_dense(self, spans: Sequence[Span]) -> bool:
        shown = self.shown(spans)
        num_narrow = sum(span.seconds * self.px_per_second < _DENSE_PX for span in shown)
        return num_narrow > _DENSE_SPANS and num_narrow * 2 > len(shown)

    def _row(self, row: Row, y: float) -> list[str]:
        if self._is_dense(row.spans):
            return self._shares(row.spans, y)
        parts = row.without_overlap()
        height = _LANE_HEIGHT / max(1, len(parts))
        shapes = []
        for number, spans in enumerate(parts):
            shapes += self._line_of_spans(self.shown(spans), y + number * height, height)
        return shapes

    def _shares(self, spans: Sequence[Span], y: float) -> list[str]:
        """Draw one area per kind, stacked: how much of each few pixels of time the kind took."""
        num_bins = math.ceil((self.right_px - _LEFT) / _DENSE_BIN_PX)
        px_by_kind = {kind: [0.0] * num_bins for kind in self.colours}
        for span in self.shown(spans):
            left = self.x(span.start_seconds) - _LEFT
            right = self.x(span.end_seconds) - _LEFT
            last = min(num_bins - 1, int(right / _DENSE_BIN_PX))
            for index in range(min(num_bins - 1, int(left / _DENSE_BIN_PX)), last + 1):
                start = index * _DENSE_BIN_PX
                covered = min(right, start + _DENSE_BIN_PX) - max(left, start)
                px_by_kind[span.group][index] += max(0.0, covered)
        shapes = []
        below = [0.0] * num_bins  # share of the height already taken, bin by bin
        for kind, px in px_by_kind.items():
            # Requests in flight together may add up to more than the time there is.
            above = [
                min(1.0, low + own / _DENSE_BIN_PX) for low, own in zip(below, px, strict=True)
            ]
            if above != below:
                shapes.append(self._area(below, above, self.colours[kind], y))
            below = above
        return shapes

    def _area(self, below: Sequence[float], above: Sequence[float], colour: str, y: float) -> str:
        """Draw the area between two stepped lines, given as shares of a lane's height."""
        bottom = y + _LANE_HEIGHT
        path = ""
        index = 0
        while index < len(above):
            end = index + 1
            while end < len(above) and (below[end], above[end]) == (below[index], above[index]):
                end += 1
            if above[index] > below[index]:
                left = _LEFT + index * _DENSE_BIN_PX
                right = min(_LEFT + end * _DENSE_BIN_PX, self.right_px)
                low, high = (
                    bottom - share * _LANE_HEIGHT for share in (below[index], above[index])
                )
                corners = (svg.number_of(value) for value in (left, high, right, low, left))
                path += "M{} {}H{}V{}H{}Z".format(*corners)
            index = end
        return f'<path d="{path}" fill="{colour}"/>'

    def _line_of_spans(self, spans: Sequence[Span], y: float, height: float) -> list[str]:
        """Draw spans that do not overlap; what is narrower than a pixel goes into pixel columns."""
        shapes = []
        px_by_column: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for span in spans:
            left, right = self.x(span.start_seconds), self.x(span.end_seconds)
            if right - left >= 1:
                shapes.append(_wide_span(span, left, right, self.colours[span.group], y, height))
                continue
            # A span may lie across two columns; one without length still leaves a faint mark.
            for column in range(math.floor(left), math.floor(right) + 1):
                px_by_column[column][span.group] += min(right, column + 1) - max(left, column)
        return self._merged_columns(px_by_column, y, height) + shapes

    def _merged_columns(
        self, px_by_column: Mapping[int, Mapping[str, float]], y: float, height: float
    ) -> list[str]:
        """Draw pixel columns in the colour that fills most of each, as dense as they are filled."""
        runs: list[tuple[int, int, str, int]] = []  # first column, end, kind, density
        for column in sorted(px_by_column):
            kinds = px_by_column[column]
            kind = max(sorted(kinds), key=lambda name: kinds[name])
            density = max(1, round(min(1.0, sum(kinds.values())) * _OPACITY_STEPS))
            first = column
            if runs and runs[-1][1:] == (column, kind, density):
                first = runs.pop()[0]
            runs.append((first, column + 1, kind, density))
        return [
            svg.box(
                first,
                y,
                end - first,
                height,
                colour=self.colours[kind],
                opacity=density / _OPACITY_STEPS,
            )
            for first, end, kind, density in runs
        ]

    def _memory(self, counter: Counter, name: str, y: float) -> list[str]:
        """Draw bytes in use over time, with the budget as a dashed line."""
        ceiling = max(counter.peak_bytes, counter.budget_bytes or 0, 1)
        bottom = y + _MEMORY_HEIGHT
        # A little room above, so that a curve or a budget at the ceiling is still seen.
        scale = (_MEMORY_HEIGHT - 4) / ceiling
        shapes = [
            svg.label(24, y + 14, f"{name} in use", weight=600),
            svg.label(
                24, y + 28, f"peak {format_bytes(counter.peak_bytes)}", font_px=10, colour=svg.MUTED
            ),
            svg.box(_LEFT, y, self.right_px - _LEFT, _MEMORY_HEIGHT, colour=svg.TRACK),
        ]
        points = self._steps(counter)
        if points:
            path = f"M{svg.number_of(points[0][0])} {svg.number_of(bottom)}"
            for x, used in points:
                path += f"H{svg.number_of(x)}V{svg.number_of(bottom - used * scale)}"
            path += f"H{svg.number_of(self.right_px)}V{svg.number_of(bottom)}Z"
            shapes.append(f'<path d="{path}" fill="{_MEMORY_COLOUR}" fill-opacity="0.75"/>')
        if counter.budget_bytes is not None:
            at = bottom - counter.budget_bytes * scale
            shapes.append(svg.line(_LEFT, at, self.right_px, at, colour=svg.LIMIT, is_dashed=True))
            budget = f"budget {format_bytes(counter.budget_bytes)}"
            shapes.append(svg.label(24, y + 41, budget, font_px=10, colour=svg.LIMIT))
        return shapes

    def _steps(self, counter: Counter) -> list[tuple[float, int]]:
        """Return the curve's steps, at most two per pixel: the highest value and the last one.

        The highest must be seen, because that is what a budget is about; the last is what holds on.
        """
        points: list[tuple[float, int]] = []
        for at_seconds, used in zip(counter.at_seconds, counter.used_bytes, strict=True):
            if at_seconds > self.end_seconds:
                break
            x = math.floor(self.x(at_seconds) * 2) / 2
            if points and at_seconds <= self.start_seconds:
                points[-1] = (x, used)  # before the window only the newest value matters
            elif len(points) >= 2 and points[-1][0] == points[-2][0] == x:
                points[-2] = (x, max(points[-2][1], points[-1][1], used))
                points[-1] = (x, used)
            else:
                points.append((x, used))
        return points


def _wide_span(span: Span, left: float, right: float, colour: str, y: float, height: float) -> str:
    width = right - left
    # A hair of a gap keeps neighbours of one colour apart where there is room for it.
    gap = 0.6 if width >= 3 else 0.0
    radius = 1.5 if width >= 8 else 0.0
    hint = _hint(span) if width >= 2 else ""
    shape = svg.box(left, y, width - gap, height, colour=colour, radius=radius, hint=hint)
    words = (
        span.name
        if len(span.name) * _LETTER_PX <= width - 6
        else ("" if span.block is None else str(span.block))
    )
    # Room for two digits: a row in which only the blocks below 10 are numbered looks broken.
    if height >= 14 and words and max(2, len(words)) * _LETTER_PX <= width - 4:
        ink = svg.INK_ON_COLOUR if is_light(colour) else "#ffffff"
        middle = (left + right - gap) / 2
        baseline = y + height / 2 + 3.8
        shape += svg.label(middle, baseline, words, font_px=10.5, colour=ink, anchor="middle")
    return shape


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
