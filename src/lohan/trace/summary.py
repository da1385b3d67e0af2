"""Summary: a trace in numbers. Busy and idle per lane, overlap, what each lane waited for.

Owns the arithmetic and its text form. A lane waits when it is idle before a span; the wait is put
down to `waited_for` if the span says it, else to the dependency that ended last. Read by reports,
by the log line of a step, and by tests that judge overlap.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lohan.trace.rows import Dependencies, Interval, Row, overlap_seconds, rows_of
from lohan.trace.span import Span, Trace
from lohan.units import format_bytes, format_rate, format_seconds
from lohan.vocabulary import Lane, Tier

NO_MORE_WORK = "end of its work"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSummary:
    """One lane over the window of the summary."""

    label: str
    lane: Lane
    rank: int
    num_spans: int
    busy_seconds: float
    idle_seconds: float
    moved_bytes: int
    waited_seconds: Mapping[str, float]
    """Idle seconds by what was waited for, most first. They add up to `idle_seconds`."""

    @property
    def busy_share(self) -> float:
        """Busy part of the window, 0 to 1."""
        total_seconds = self.busy_seconds + self.idle_seconds
        return self.busy_seconds / total_seconds if total_seconds > 0 else 0.0

    @property
    def moved_bytes_per_second(self) -> float:
        """Bytes moved per busy second."""
        return self.moved_bytes / self.busy_seconds if self.busy_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A window of a trace in numbers."""

    name: str
    is_simulated: bool
    start_seconds: float
    end_seconds: float
    lanes: tuple[LaneSummary, ...]
    overlap_seconds: Mapping[tuple[str, str], float]
    """For each two lanes, by label, how long both were busy at once; both orders are listed."""
    peak_bytes: Mapping[Tier, int]

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end_seconds - self.start_seconds

    def lane(self, label: str) -> LaneSummary | None:
        """Return a lane by its label; None if it had no spans."""
        return next((lane for lane in self.lanes if lane.label == label), None)

    def to_text(self) -> str:
        """Print it for a terminal."""
        source = "simulated" if self.is_simulated else "measured"
        lines = [f"{self.name} ({source}): {format_seconds(self.seconds)}", ""]
        table = [["lane", "busy", "", "idle", "spans", "moved", "rate while busy", "waited for"]]
        for lane in self.lanes:
            waits = [
                f"{cause} {format_seconds(seconds)}"
                for cause, seconds in list(lane.waited_seconds.items())[:3]
            ]
            has_bytes = lane.moved_bytes > 0
            table.append(
                [
                    lane.label,
                    format_seconds(lane.busy_seconds),
                    f"{100 * lane.busy_share:.0f} %",
                    format_seconds(lane.idle_seconds),
                    str(lane.num_spans),
                    format_bytes(lane.moved_bytes) if has_bytes else "-",
                    format_rate(lane.moved_bytes_per_second) if has_bytes else "-",
                    ", ".join(waits) or "-",
                ]
            )
        lines += _aligned(table, num_text_columns_at_end=1)
        labels = [lane.label for lane in self.lanes]
        if len(labels) > 1:
            lines += ["", "overlap: share of a row's busy time in which the column was busy too"]
            shares = [["", *labels]]
            for lane in self.lanes:
                both = {
                    pair[1]: s for pair, s in self.overlap_seconds.items() if pair[0] == lane.label
                }
                cells = [_percent(both.get(other), lane.busy_seconds) for other in labels]
                shares.append([lane.label, *cells])
            lines += _aligned(shares, num_text_columns_at_end=0)
        if self.peak_bytes:
            peaks = (f"{tier} {format_bytes(peak)}" for tier, peak in self.peak_bytes.items())
            lines += ["", "peak: " + ", ".join(peaks)]
        return "\n".join(lines) + "\n"


def summarise(
    trace: Trace, *, start_seconds: float | None = None, end_seconds: float | None = None
) -> Summary:
    """Return a trace in numbers, or the part of it in a window (one steady step, for example)."""
    start = trace.start_seconds if start_seconds is None else start_seconds
    end = trace.end_seconds if end_seconds is None else end_seconds
    end = max(start, end)
    rows = rows_of(trace)
    busy = {row.label: _clipped(row.busy, start, end) for row in rows}
    dependencies = Dependencies(trace)
    peaks: dict[Tier, int] = {}
    for counter in trace.counters:
        peaks[counter.tier] = max(peaks.get(counter.tier, 0), counter.peak_bytes)
    return Summary(
        name=trace.name,
        is_simulated=trace.is_simulated,
        start_seconds=start,
        end_seconds=end,
        lanes=tuple(_lane(row, busy[row.label], dependencies, start, end) for row in rows),
        overlap_seconds={
            (one, other): overlap_seconds(busy[one], busy[other])
            for one in busy
            for other in busy
            if one != other
        },
        peak_bytes=peaks,
    )


def _clipped(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    cut = ((max(a, start), min(b, end)) for a, b in intervals)
    return [(a, b) for a, b in cut if b > a]


def _lane(
    row: Row, busy: Sequence[Interval], dependencies: Dependencies, start: float, end: float
) -> LaneSummary:
    inside = [span for span in row.spans if span.end_seconds > start and span.start_seconds < end]
    waited: dict[str, float] = defaultdict(float)
    for cause, seconds in _waits(row, dependencies, start, end):
        waited[cause] += seconds
    busy_seconds = sum(b - a for a, b in busy)
    return LaneSummary(
        label=row.label,
        lane=row.lane,
        rank=row.rank,
        num_spans=len(inside),
        busy_seconds=busy_seconds,
        idle_seconds=max(0.0, end - start - busy_seconds),
        moved_bytes=round(
            sum((span.nbytes or 0) * _share_inside(span, start, end) for span in inside)
        ),
        waited_seconds=dict(sorted(waited.items(), key=lambda item: (-item[1], item[0]))),
    )


def _share_inside(span: Span, start: float, end: float) -> float:
    # A span across the edge of the window counts by the part of it that lies inside.
    if span.seconds == 0:
        return 1.0
    return (min(span.end_seconds, end) - max(span.start_seconds, start)) / span.seconds


def _waits(
    row: Row, dependencies: Dependencies, start: float, end: float
) -> Iterator[tuple[str, float]]:
    """What the lane waited for wherever it was idle, and for how long."""
    free_seconds = start
    for span in row.spans:
        idle_seconds = min(span.start_seconds, end) - free_seconds
        if idle_seconds > 0:
            yield _cause(span, dependencies, free_seconds), idle_seconds
        free_seconds = max(free_seconds, span.end_seconds)
    if end > free_seconds:
        yield NO_MORE_WORK, end - free_seconds


def _cause(span: Span, dependencies: Dependencies, free_seconds: float) -> str:
    if span.waited_for is not None:
        return span.waited_for
    last = dependencies.last_of(span)
    if last is None or last.end_seconds <= free_seconds:
        return NOT_RECORDED
    return f"{last.lane} {last.group}"


def _percent(part: float | None, whole: float) -> str:
    if part is None:  # of itself
        return "."
    return f"{100 * part / whole:.0f} %" if whole > 0 else "-"


def _aligned(table: Sequence[Sequence[str]], *, num_text_columns_at_end: int) -> list[str]:
    """Columns side by side: texts to the left (the first and the last ones), numbers right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    first_text = len(widths) - num_text_columns_at_end
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if index == 0 or index >= first_text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
