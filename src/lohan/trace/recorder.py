"""Recorder: spans and memory samples from any thread, at a cost that does not show.

Owns the buffers of a running process: one per thread, so recording takes no lock, and bounded, so a
run of weeks keeps the newest spans in constant memory. Makes a `Trace` when asked. Does not know
what is recorded, and does not write files. Called by the engine's lanes; the simulator builds its
`Trace` directly.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

from lohan.trace.span import Counter, Span, Trace
from lohan.vocabulary import BlockId, Lane, TaskId, Tier

DEFAULT_CAPACITY_SPANS = 1 << 17
"""Spans kept per thread: about 40 MB each when full, and weeks of steps for a lane of few tasks."""

_Row = tuple[
    Lane,
    str,
    float,
    float,
    str,
    TaskId | None,
    BlockId | None,
    int | None,
    str | None,
    int,
]
_Sample = tuple[Tier, float, int]
_T = TypeVar("_T")


class OpenSpan:
    """A span under way, as `with recorder.span(...) as span` gives it.

    Runs on: the thread that opened it. Until it closes, `nbytes` and `waited_for` may be filled in.
    """

    __slots__ = (
        "_recorder",
        "_start_seconds",
        "block",
        "kind",
        "lane",
        "name",
        "nbytes",
        "step",
        "task",
        "waited_for",
    )

    def __init__(
        self,
        recorder: "Recorder | None",
        lane: Lane,
        name: str,
        kind: str,
        task: TaskId | None,
        block: BlockId | None,
        nbytes: int | None,
        waited_for: str | None,
        step: int,
    ) -> None:
        self._recorder = recorder
        self._start_seconds = 0.0
        self.lane, self.name, self.kind = lane, name, kind
        self.task, self.block, self.step = task, block, step
        self.nbytes, self.waited_for = nbytes, waited_for

    def __enter__(self) -> "OpenSpan":
        if self._recorder is not None:
            self._start_seconds = self._recorder.now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        if recorder is not None:
            end_seconds = recorder.now()
            recorder._rows().append(
                (
                    self.lane,
                    self.name,
                    self._start_seconds,
                    end_seconds,
                    self.kind,
                    self.task,
                    self.block,
                    self.nbytes,
                    self.waited_for,
                    self.step,
                )
            )


# What a recorder that is off hands out: one object for everybody, so a span costs one call.
_NOTHING = OpenSpan(None, Lane.GPU, "", "", None, None, None, None, 0)


class _ThreadRows(threading.local):
    rows: "deque[_Row] | None" = None
    samples: "deque[_Sample] | None" = None


class Recorder:
    """Collects spans and samples of one process.

    Runs on: any thread, at the same time. May block: never, except that a thread's first record
    takes a lock to add its buffer. Owns until: rows belong to the recorder once recorded; a thread
    may end, what it recorded stays.
    """

    def __init__(
        self,
        *,
        is_on: bool = True,
        capacity_spans: int = DEFAULT_CAPACITY_SPANS,
        clock: Callable[[], float] = time.perf_counter,
        rank: int = 0,
    ) -> None:
        assert capacity_spans > 0
        self.is_on = is_on
        self.now = clock
        self._capacity_spans = capacity_spans
        self._rank = rank
        self._origin_seconds = clock()
        self._own = _ThreadRows()
        self._all_rows: list[deque[_Row]] = []
        self._all_samples: list[deque[_Sample]] = []
        self._lock = threading.Lock()

    def span(
        self,
        lane: Lane,
        name: str,
        kind: str = "",
        task: TaskId | None = None,
        block: BlockId | None = None,
        nbytes: int | None = None,
        waited_for: str | None = None,
        step: int = 0,
    ) -> OpenSpan:
        """Return a context whose body is recorded as one span, also when it raises."""
        if not self.is_on:
            return _NOTHING
        return OpenSpan(self, lane, name, kind, task, block, nbytes, waited_for, step)

    def record(
        self,
        lane: Lane,
        name: str,
        start_seconds: float,
        end_seconds: float,
        kind: str = "",
        task: TaskId | None = None,
        block: BlockId | None = None,
        nbytes: int | None = None,
        waited_for: str | None = None,
        step: int = 0,
    ) -> None:
        """Record a span that was timed elsewhere, with times as `now()` gives them."""
        if self.is_on:
            row = (
                lane,
                name,
                start_seconds,
                end_seconds,
                kind,
                task,
                block,
                nbytes,
                waited_for,
                step,
            )
            self._rows().append(row)

    def sample(self, tier: Tier, used_bytes: int) -> None:
        """Record how many bytes a tier holds from now on."""
        if self.is_on:
            samples = self._own.samples
            if samples is None:
                samples = self._own.samples = deque(maxlen=self._capacity_spans)
                with self._lock:
                    self._all_samples.append(samples)
            samples.append((tier, self.now(), used_bytes))

    def last_spans(self, lane: Lane, count: int = 10) -> tuple[Span, ...]:
        """Return the newest spans of a lane, oldest first: the story told when a task fails."""
        rows = [row for row in self._snapshot(self._all_rows) if row[0] == lane]
        rows.sort(key=lambda row: row[3])
        return tuple(self._span(row) for row in rows[-count:]) if count > 0 else ()

    def trace(
        self,
        name: str,
        *,
        comes_after: Mapping[TaskId, Sequence[TaskId]] | None = None,
        budgets_bytes: Mapping[Tier, int] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Trace:
        """Return everything recorded so far as a `Trace`; recording goes on.

        Runs on: any thread, also while others record; spans that end meanwhile may be missing.
        """
        rows = sorted(self._snapshot(self._all_rows), key=lambda row: (row[2], row[3]))
        facts = dict(metadata or {})
        with self._lock:
            if any(len(buffer) == buffer.maxlen for buffer in self._all_rows):
                facts["oldest_spans_dropped"] = f"over {self._capacity_spans} in one thread"
        return Trace(
            name=name,
            is_simulated=False,
            spans=tuple(self._span(row) for row in rows),
            counters=self._counters(budgets_bytes or {}),
            comes_after={task: tuple(after) for task, after in (comes_after or {}).items()},
            metadata=facts,
        )

    def clear(self) -> None:
        """Forget what was recorded so far; spans under way will be recorded when they end."""
        with self._lock:
            for rows in self._all_rows:
                rows.clear()
            for samples in self._all_samples:
                samples.clear()

    def _rows(self) -> "deque[_Row]":
        rows = self._own.rows
        if rows is None:
            rows = self._own.rows = deque(maxlen=self._capacity_spans)
            with self._lock:
                self._all_rows.append(rows)
        return rows

    def _snapshot(self, buffers: "list[deque[_T]]") -> list[_T]:
        with self._lock:
            known = list(buffers)
        return [one for buffer in known for one in _copied(buffer)]

    def _span(self, row: _Row) -> Span:
        lane, name, start_seconds, end_seconds, kind, task, block, nbytes, waited_for, step = row
        return Span(
            lane=lane,
            name=name,
            start_seconds=start_seconds - self._origin_seconds,
            end_seconds=end_seconds - self._origin_seconds,
            kind=kind,
            task=task,
            block=block,
            nbytes=nbytes,
            waited_for=waited_for,
            step=step,
            rank=self._rank,
        )

    def _counters(self, budgets_bytes: Mapping[Tier, int]) -> tuple[Counter, ...]:
        samples = sorted(self._snapshot(self._all_samples), key=lambda sample: sample[1])
        counters = []
        for tier in Tier:
            own = [sample for sample in samples if sample[0] == tier]
            if own:
                counters.append(
                    Counter(
                        tier=tier,
                        at_seconds=tuple(at - self._origin_seconds for _, at, _ in own),
                        used_bytes=tuple(used for _, _, used in own),
                        budget_bytes=budgets_bytes.get(tier),
                        rank=self._rank,
                    )
                )
        return tuple(counters)


def _copied(buffer: "deque[_T]") -> list[_T]:
    while True:
        try:
            return list(buffer)
        except RuntimeError:  # its thread recorded in the middle of the copy
            continue
