"""Chrome export: traces as trace-event JSON, which Perfetto and chrome://tracing open.

Owns that file format only. One process per trace, so a predicted and a measured run stand side by
side; one named row per lane; arrows between dependent spans; one counter per tier. Called by the
command line.
"""

import json
from collections.abc import Iterator
from itertools import count

from lohan.trace.rows import Dependencies, rows_of
from lohan.trace.span import Span, Trace

_Event = dict[str, object]
_MICROSECONDS = 1e6
# An arrow must begin inside the span it leaves; at its very end the next span could be meant.
_ARROW_LEAVES_AT = 0.99


def chrome_json(*traces: Trace) -> str:
    """Return one or more traces as one trace-event JSON text; the first one is on top.

    Arrows are drawn where a trace knows what its tasks come after.
    """
    arrow_ids = count(1)
    events: list[_Event] = []
    for index, trace in enumerate(traces):
        events += _process(trace, pid=index + 1, arrow_ids=arrow_ids)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _process(trace: Trace, *, pid: int, arrow_ids: Iterator[int]) -> Iterator[_Event]:
    source = "simulated" if trace.is_simulated else "measured"
    yield _named("process_name", pid, 0, name=f"{trace.name} ({source})")
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    if trace.metadata:
        yield _named("process_labels", pid, 0, labels=_labels(trace))
    tid_of: dict[Span, int] = {}
    tid = 0
    for row in rows_of(trace):
        for number, spans in enumerate(row.without_overlap()):
            tid += 1
            label = row.label if number == 0 else f"{row.label} ({number + 1})"
            yield _named("thread_name", pid, tid, name=label)
            yield _named("thread_sort_index", pid, tid, sort_index=tid)
            for span in spans:
                tid_of[span] = tid
                yield _complete(span, pid, tid)
    yield from _arrows(trace, pid, tid_of, arrow_ids)
    yield from _counters(trace, pid)


def _named(event: str, pid: int, tid: int, **args: object) -> _Event:
    return {"name": event, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def _labels(trace: Trace) -> str:
    return ", ".join(f"{key}: {value}" for key, value in trace.metadata.items())


def _microseconds(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)


def _complete(span: Span, pid: int, tid: int) -> _Event:
    facts = {
        "task": span.task,
        "block": span.block,
        "bytes": span.nbytes,
        "waited_for": span.waited_for,
        "step": span.step,
    }
    start = _microseconds(span.start_seconds)
    return {
        "name": span.name,
        "cat": span.group or "span",
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start,
        # From the rounded ends, so that neighbours that touch still touch and never overlap.
        "dur": round(_microseconds(span.end_seconds) - start, 3),
        "args": {key: value for key, value in facts.items() if value is not None},
    }


def _arrows(
    trace: Trace, pid: int, tid_of: dict[Span, int], arrow_ids: Iterator[int]
) -> Iterator[_Event]:
    for earlier, later in Dependencies(trace).pairs():
        leaves_seconds = earlier.start_seconds + _ARROW_LEAVES_AT * earlier.seconds
        arrow: _Event = {"name": "comes after", "cat": "arrow", "id": next(arrow_ids), "pid": pid}
        leaves = {"ph": "s", "tid": tid_of[earlier], "ts": _microseconds(leaves_seconds)}
        arrives = {"ph": "f", "tid": tid_of[later], "ts": _microseconds(later.start_seconds)}
        yield arrow | leaves
        yield arrow | arrives | {"bp": "e"}


def _counters(trace: Trace, pid: int) -> Iterator[_Event]:
    has_ranks = len({counter.rank for counter in trace.counters}) > 1
    for counter in trace.counters:
        owner = f"{counter.tier} {counter.rank}" if has_ranks else str(counter.tier)
        for at_seconds, used in zip(counter.at_seconds, counter.used_bytes, strict=True):
            yield _counted(f"{owner} used bytes", pid, at_seconds, used)
        if counter.budget_bytes is not None:
            for at_seconds in (trace.start_seconds, trace.end_seconds):
                yield _counted(f"{owner} budget bytes", pid, at_seconds, counter.budget_bytes)


def _counted(name: str, pid: int, at_seconds: float, value: int) -> _Event:
    event: _Event = {"name": name, "ph": "C", "pid": pid, "tid": 0}
    return event | {"ts": _microseconds(at_seconds), "args": {"bytes": value}}
