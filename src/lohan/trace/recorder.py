"""Recorder: spans and memory samples from any thread, at a cost that does not show.

Owns the buffers of a running process: one per thread, so recording takes no lock, and bounded, so a
run of weeks keeps the newest spans in constant memory. Makes a `Trace` when asked. Does not know
what is recorded, and does not write files. Called by the engine's lanes; the simulator builds its
`Trace` directly.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from lohan.trace.span import Counter, Span, Trace
from lohan.vocabulary import BlockId, Lane, TaskId, Tier

DEFAULT_CAPACITY_SPANS = 1 << 17
"""Spans kept per living thread (27 MB when full), and once more for all threads that ended."""

_Row = tuple[Any, ...]  # the values of a Span's first fields, in order
_COLUMNS = tuple(Span.__dataclass_fields__)[:-1]
_Sample = tuple[Tier, float, int]
_T = TypeVar("_T")


class _Buffers(Generic[_T]):
    """One bounded buffer per thread, so that adding to one's own takes no lock."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._own = threading.local()
        self._lock = threading.Lock()
        self._of_threads: list[tuple[threading.Thread, deque[_T]]] = []
        self._of_ended: deque[_T] = deque(maxlen=capacity)

    def own(self) -> deque[_T]:
        """Return the buffer of the calling thread. May block: only on a thread's first call."""
        try:
            return self._own.buffer  # type: ignore[no-any-return]
        except AttributeError:
            return self._add_own()

    def _add_own(self) -> deque[_T]:
        buffer: deque[_T] = deque(maxlen=self._capacity)
        self._own.buffer = buffer
        with self._lock:
            # Threads may come and go by the step; what the ended ones left shares one buffer.
            living = [(threading.current_thread(), buffer)]
            for thread, left in self._of_threads:
                if thread.is_alive():
                    living.append((thread, left))
                else:
                    self._of_ended.extend(left)
            self._of_threads = living
        return buffer

    def copied(self) -> list[_T]:
        """Return what all threads added. Runs on: any thread, also while others add."""
        with self._lock:
            found = list(self._of_ended)
            for _, buffer in self._of_threads:
                found += _copied(buffer)
        return found

    def is_full(self) -> bool:
        """Return whether something may have been dropped."""
        with self._lock:
            buffers = [self._of_ended, *(buffer for _, buffer in self._of_threads)]
            return any(len(buffer) == self._capacity for buffer in buffers)


class Recorder:
    """Collects spans and samples of one process.

    Runs on: any thread, at the same time. May block: never, except that a thread's first record
    takes a lock to add its buffer. Owns until: rows belong to the recorder once recorded; a thread
    may end, what it recorded stays. Memory: `capacity_spans` rows per living thread, as many again
    for all that ended; the oldest go first.
    """

    def __init__(
        self,
        *,
        is_on: bool = True,
        capacity_spans: int = DEFAULT_CAPACITY_SPANS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert capacity_spans > 0
        self.is_on = is_on
        self.now = clock
        self._capacity_spans = capacity_spans
        self._origin_seconds = clock()
        self._rows: _Buffers[_Row] = _Buffers(capacity_spans)
        self._samples: _Buffers[_Sample] = _Buffers(capacity_spans)

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
        """Record a span, with times as `now()` gives them."""
        if self.is_on:
            self._rows.own().append(
                (
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
            )

    def sample(self, tier: Tier, used_bytes: int) -> None:
        """Record how many bytes a tier holds from now on."""
        if self.is_on:
            self._samples.own().append((tier, self.now(), used_bytes))

    def last_spans(self, lane: Lane, count: int = 10) -> tuple[Span, ...]:
        """Return the newest spans of a lane, oldest first: the story told when a task fails."""
        rows = [row for row in self._rows.copied() if row[0] == lane]
        rows.sort(key=lambda row: row[3])
        return tuple(self._span(row) for row in rows[-count:]) if count > 0 else ()

    def trace(self, name: str, *, budgets_bytes: Mapping[Tier, int] | None = None) -> Trace:
        """Return everything recorded so far as a `Trace`; recording goes on.

        Runs on: any thread, also while others record; spans that end meanwhile may be missing.
        """
        rows = sorted(self._rows.copied(), key=lambda row: (row[2], row[3]))
        kept = {"spans_kept": f"the newest {self._capacity_spans} of each thread"}
        return Trace(
            name=name,
            is_simulated=False,
            spans=tuple(self._span(row) for row in rows),
            counters=self._counters(budgets_bytes or {}),
            metadata=kept if self._rows.is_full() else {},
        )

    def _span(self, row: _Row) -> Span:
        fields = dict(zip(_COLUMNS, row, strict=True))
        fields["start_seconds"] -= self._origin_seconds
        fields["end_seconds"] -= self._origin_seconds
        return Span(**fields)

    def _counters(self, budgets_bytes: Mapping[Tier, int]) -> tuple[Counter, ...]:
        samples = sorted(self._samples.copied(), key=lambda sample: sample[1])
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
                    )
                )
        return tuple(counters)


def _copied(buffer: deque[_T]) -> list[_T]:
    while True:
        try:
            return list(buffer)
        except RuntimeError:  # its thread recorded in the middle of the copy
            continue
