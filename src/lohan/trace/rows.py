"""Rows: the spans of a trace, lane by lane, and the arithmetic of intervals.

Owns how spans are grouped for reading (one row per lane and rank, in the order of the vocabulary)
and which span another one waited for. Shared by the summary and by everything that draws.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lohan.trace.span import Span, Trace
from lohan.vocabulary import Lane, TaskId

Interval = tuple[float, float]
"""Beginning and end in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One lane of one rank, with its spans in order of beginning."""

    lane: Lane
    rank: int
    label: str
    spans: tuple[Span, ...]

    @property
    def busy(self) -> list[Interval]:
        """When at least one span was under way."""
        return merged((span.start_seconds, span.end_seconds) for span in self.spans)

    def without_overlap(self) -> list[list[Span]]:
        """Split the spans so that in each part one begins only when the one before has ended.

        A lane runs one task at a time, but a task may be recorded as several requests in flight,
        which cannot be drawn on one line. An overlap below a nanosecond is rounding.
        """
        parts: list[list[Span]] = []
        for span in self.spans:
            start_seconds = round(span.start_seconds, 9)
            for part in parts:
                if round(part[-1].end_seconds, 9) <= start_seconds:
                    part.append(span)
                    break
            else:
                parts.append([span])
        return parts


def rows_of(trace: Trace) -> tuple[Row, ...]:
    """Return the rows of a trace: by lane, then rank. Lanes without spans are left out."""
    by_row: dict[tuple[int, int], list[Span]] = defaultdict(list)
    order = {lane: index for index, lane in enumerate(Lane)}
    for span in trace.spans:
        by_row[order[span.lane], span.rank].append(span)
    lanes = tuple(Lane)
    has_ranks = len({rank for _, rank in by_row}) > 1
    return tuple(
        Row(
            lane=lanes[index],
            rank=rank,
            label=f"{lanes[index]} {rank}" if has_ranks else str(lanes[index]),
            spans=tuple(sorted(spans, key=lambda span: (span.start_seconds, span.end_seconds))),
        )
        for (index, rank), spans in sorted(by_row.items())
    )


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, which come in order of beginning."""
    union: list[Interval] = []
    for start, end in intervals:
        if union and start <= union[-1][1]:
            if end > union[-1][1]:
                union[-1] = (union[-1][0], end)
        else:
            union.append((start, end))
    return union


def overlap_seconds(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return for how long both unions of intervals hold at once."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if end > start:
            total += end - start
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return total


class Dependencies:
    """Finds, for the spans of one trace, the spans of the tasks they come after.

    A task is looked for in the step of the span, else in the newest step before it: the forward of
    a step may come after an update of the step before.
    """

    def __init__(self, trace: Trace) -> None:
        self._comes_after = trace.comes_after
        self._by_task: dict[TaskId, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
        for span in trace.spans:
            if span.task is not None:
                self._by_task[span.task][span.step].append(span)

    def of(self, span: Span) -> list[Span]:
        """Return the last span of each task this one had to wait for."""
        if span.task is None:
            return []
        found = []
        for task in self._comes_after.get(span.task, ()):
            by_step = self._by_task.get(task, {})
            step = max((step for step in by_step if step <= span.step), default=None)
            if step is not None:
                found.append(max(by_step[step], key=lambda other: other.end_seconds))
        return found

    def pairs(self) -> Iterator[tuple[Span, Span]]:
        """Return every known dependency once: the span that ended, the span that could begin."""
        for by_step in self._by_task.values():
            for spans in by_step.values():
                first = min(spans, key=lambda span: span.start_seconds)
                for earlier in self.of(first):
                    yield earlier, first

    def last_of(self, span: Span) -> Span | None:
        """Return the one that ended last: what the span waited for."""
        return max(self.of(span), key=lambda other: other.end_seconds, default=None)
