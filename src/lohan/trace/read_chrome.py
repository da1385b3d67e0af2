"""Chrome import: the traces in a trace-event JSON text that `chrome_json` wrote.

Owns reading that format back, for reports made from the files of a run. What the format does not
hold is not made up: the tasks a task comes after are left out. Events of other programs on rows
that are no lane are left out too. Writing is in `chrome.py`.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lohan.errors import ConfigError
from lohan.trace.span import Counter, Span, Trace
from lohan.vocabulary import BlockId, Lane, TaskId, Tier

_SECONDS = 1e-6
_SOURCES = {" (simulated)": True, " (measured)": False}
# "ssd_read", "ssd_read 1" (a rank), "ssd_read (2)" (requests in flight together).
_ROW = re.compile(r"(?P<lane>[a-z_]+)(?: (?P<rank>\d{1,6}))?(?: \(\d+\))?")
_COUNTER = re.compile(r"(?P<tier>[A-Z]+)(?: (?P<rank>\d{1,6}))? (?P<what>used|budget) bytes")

_Event = Mapping[str, object]


@dataclass(slots=True)
class _Process:
    """What is known of one trace while its events are read."""

    name: str = "trace"
    is_simulated: bool = False
    labels: str = ""
    rows: dict[object, tuple[Lane, int]] = field(default_factory=dict)
    events: list[_Event] = field(default_factory=list)
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


def _name(process: _Process, event: _Event) -> None:
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


def _count(process: _Process, event: _Event) -> None:
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
        samples.sort(key=lambda sample: sample[0])
        counters.append(
            Counter(
                tier=tier,
                rank=rank,
                at_seconds=tuple(at for at, _ in samples),
                used_bytes=tuple(used for _, used in samples),
                budget_bytes=process.budgets.get((tier, rank)),
            )
        )
    return Trace(
        name=process.name,
        is_simulated=process.is_simulated,
        spans=tuple(spans),
        counters=tuple(counters),
        metadata=_metadata(process.labels),
    )


def _span(event: _Event, lane: Lane, rank: int) -> Span:
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


def _args(event: _Event) -> Mapping[str, object]:
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
