"""Traces as trace-event JSON, which Perfetto and chrome://tracing open, and read back from it.

Owns that file format only. One process per trace, so a predicted and a measured run stand side by
side; one named row per lane; arrows between dependent spans; one counter per tier. What the format
does not hold is not made up by a reader: the tasks a task comes after are left out, and so are
events of other programs on rows that are no lane. Written by runs and commands, read by reports.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from lohan.errors import ConfigError
from lohan.trace.rows import Dependencies, rows_of
from lohan.trace.span import Counter, Span, Trace
from lohan.vocabulary import BlockId, Lane, TaskId, Tier

_Event = dict[str, object]
_ReadEvent = Mapping[str, object]
_MICROSECONDS = 1e6
# An arrow must begin inside the span it leaves; at its very end the next span could be meant.
_ARROW_LEAVES_AT = 0.99
_SECONDS = 1e-6
_SOURCES = {" (simulated)": True, " (measured)": False}
# "ssd_read", "ssd_read 1" (a rank), "ssd_read (2)" (requests in flight together).
_ROW = re.compile(r"(?P<lane>[a-z_]+)(?: (?P<rank>\d{1,6}))?(?: \(\d+\))?")
_COUNTER = re.compile(r"(?P<tier>[A-Z]+)(?: (?P<rank>\d{1,6}))? (?P<what>used|budget) bytes")


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
        labels = ", ".join(f"{key}: {value}" for key, value in trace.metadata.items())
        yield _named("process_labels", pid, 0, labels=labels)
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


def _microseconds(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)


def _complete(span: Span, pid: int, tid: int) -> _Event:
    facts: _Event = {"task": span.task, "block": span.block, "bytes": span.nbytes}
    facts |= {"waited_for": span.waited_for, "step": span.step}
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


@dataclass(slots=True)
class _Process:
    """What is known of one trace while its events are read."""

    name: str = "trace"
    is_simulated: bool = False
    labels: str = ""
    rows: dict[object, tuple[Lane, int]] = field(default_factory=dict)
    events: list[_ReadEvent] = field(default_factory=list)
    samples: dict[tuple[Tier, int], list[tuple[float, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    budgets: dict[tuple[Tier, int], int] = field(default_factory=dict)


def traces_of_chrome(text: str, *, where: str = "trace") -> tuple[Trace, ...]:
    """Return the traces in a trace-event text, the top one first.

    Raises:
        ConfigError: if the text is no trace-event JSON, or a span of it is damaged.
    """
    try:
        found = json.loads(text)
        events = found["traceEvents"] if isinstance(found, dict) else found
        if not isinstance(events, list):
            raise TypeError("its events are no list")
        return tuple(_trace(process) for process in _processes(events))
    except (
        ArithmeticError,
        ConfigError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{where} is not a trace",
            why=f"it is no trace-event JSON, or damaged ({str(error) or type(error).__name__})",
            remedy="record or simulate it again",
        ) from error


def _processes(events: Sequence[object]) -> list[_Process]:
    by_pid: dict[object, _Process] = {}
    for event in events:
        if not isinstance(event, dict):
            raise TypeError("an event is no object")
        process = by_pid.setdefault(event.get("pid", 0), _Process())
        match event.get("ph"):
            case "M":
                _name(process, event)
            case "X":
                process.events.append(event)
            case "C":
                _count(process, event)
    return list(by_pid.values())


def _name(process: _Process, event: _ReadEvent) -> None:
    args = _args(event)
    match event.get("name"):
        case "process_name":
            process.name = str(args["name"])
            for ending, is_simulated in _SOURCES.items():
                if process.name.endswith(ending):
                    process.name = process.name.removesuffix(ending)
                    process.is_simulated = is_simulated
        case "process_labels":
            process.labels = str(args["labels"])
        case "thread_name":
            found = _ROW.fullmatch(str(args["name"]))
            if found and found["lane"] in list(Lane):
                process.rows[event.get("tid")] = Lane(found["lane"]), int(found["rank"] or 0)


def _count(process: _Process, event: _ReadEvent) -> None:
    found = _COUNTER.fullmatch(str(event.get("name")))
    if found is None or found["tier"] not in list(Tier):
        return
    key = Tier(found["tier"]), int(found["rank"] or 0)
    nbytes = int(_number(_args(event)["bytes"]))
    if found["what"] == "budget":
        process.budgets[key] = nbytes
    else:
        process.samples[key].append((_number(event["ts"]) * _SECONDS, nbytes))


def _trace(process: _Process) -> Trace:
    spans = [
        _span(event, *process.rows[event.get("tid")])
        for event in process.events
        if event.get("tid") in process.rows
    ]
    counters = []
    for (tier, rank), samples in process.samples.items():
        at, used = zip(*sorted(samples, key=lambda sample: sample[0]), strict=True)
        budget = process.budgets.get((tier, rank))
        counters.append(
            Counter(tier=tier, rank=rank, at_seconds=at, used_bytes=used, budget_bytes=budget)
        )
    return Trace(
        name=process.name,
        is_simulated=process.is_simulated,
        spans=tuple(spans),
        counters=tuple(counters),
        metadata=_metadata(process.labels),
    )


def _span(event: _ReadEvent, lane: Lane, rank: int) -> Span:
    args = _args(event)
    start = _number(event["ts"])
    task, block, nbytes = (args.get(key) for key in ("task", "block", "bytes"))
    waited_for = args.get("waited_for")
    return Span(
        lane=lane,
        name=str(event["name"]),
        start_seconds=start * _SECONDS,
        end_seconds=(start + _number(event["dur"])) * _SECONDS,
        kind=str(event.get("cat", "")),
        task=None if task is None else TaskId(int(_number(task))),
        block=None if block is None else BlockId(int(_number(block))),
        nbytes=None if nbytes is None else int(_number(nbytes)),
        waited_for=None if waited_for is None else str(waited_for),
        step=int(_number(args.get("step", 0))),
        rank=rank,
    )


def _args(event: _ReadEvent) -> Mapping[str, object]:
    args = event.get("args", {})
    if not isinstance(args, dict):
        raise TypeError("an event has arguments that are no object")
    return args


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"a number is expected, not {value!r}")
    return value


def _metadata(labels: str) -> dict[str, str]:
    """Take "key: value, key: value" apart; a piece without a colon goes on with its value."""
    found: dict[str, str] = {}
    key = ""
    for piece in labels.split(", ") if labels else []:
        before, colon, after = piece.partition(": ")
        if colon:
            key = before
            found[key] = after
        elif key:
            found[key] += f", {piece}"
    return found
