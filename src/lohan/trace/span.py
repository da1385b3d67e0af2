"""Trace: what happened on each lane and in each tier, with times.

Owns the one format for a simulated and a measured run, and its JSON form (version 1). Records
nothing (`recorder.py`), judges nothing (`summary.py`), draws nothing. Made by the simulator with
virtual seconds and by the engine with real ones; times count from the beginning of the trace.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import NoReturn, Self, cast

from lohan.errors import ConfigError
from lohan.fields import Fields, check_version, parse_object
from lohan.vocabulary import BlockId, Lane, TaskId, Tier

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of work on one lane.

    `kind` groups spans for colours and sums: a `ComputeKind` or a `TensorKind` (empty: the first
    word of the name). `waited_for` says what the lane waited for before this span, when whoever
    recorded it knows; otherwise it is found from `Trace.comes_after`. `rank` tells the lanes of
    several GPUs apart; a task is identified by its step and its id.
    """

    lane: Lane
    name: str
    start_seconds: float
    end_seconds: float
    kind: str = ""
    task: TaskId | None = None
    block: BlockId | None = None
    nbytes: int | None = None
    waited_for: str | None = None
    step: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        # Written so that NaN fails too.
        if not -math.inf < self.start_seconds <= self.end_seconds < math.inf:
            raise ConfigError(
                f"the span {self.name!r} on {self.lane} lasts from {self.start_seconds} "
                f"to {self.end_seconds} s",
                why="a span begins and ends at finite times and never ends before it begins",
                remedy="correct the clock or the file it comes from",
            )

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds

    @property
    def group(self) -> str:
        """What it is counted and coloured as: its kind, or the first word of its name."""
        return self.kind or self.name.partition(" ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """Bytes in use in one tier over time. Each sample holds until the next one."""

    tier: Tier
    at_seconds: tuple[float, ...]
    used_bytes: tuple[int, ...]
    budget_bytes: int | None = None
    rank: int = 0

    def __post_init__(self) -> None:
        at = self.at_seconds
        is_sorted = all(a <= b for a, b in pairwise(at))
        if len(at) != len(self.used_bytes) or not is_sorted or not all(map(math.isfinite, at)):
            raise ConfigError(
                f"the counter of {self.tier} has {len(at)} times and {len(self.used_bytes)} values",
                why="there must be as many finite times as values, in rising order",
                remedy="correct the file it comes from",
            )

    @property
    def peak_bytes(self) -> int:
        """The most that was in use at any time."""
        return max(self.used_bytes, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Spans, counters, and what is needed to read them later without the run.

    `comes_after` lists for a task the tasks it had to wait for, as the schedule says. `metadata` is
    free text: machine, model, versions.
    """

    name: str
    is_simulated: bool
    spans: tuple[Span, ...]
    counters: tuple[Counter, ...] = ()
    comes_after: Mapping[TaskId, tuple[TaskId, ...]] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Own copies behind read-only views: a trace does not change once it is made.
        frozen = MappingProxyType({task: tuple(after) for task, after in self.comes_after.items()})
        object.__setattr__(self, "comes_after", frozen)
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    def __reduce__(self) -> tuple[object, ...]:
        # A read-only view cannot be pickled; the JSON form holds everything.
        return (Trace.from_json, (self.to_json(),))

    @property
    def start_seconds(self) -> float:
        """When the first span begins; 0 without spans."""
        return min((span.start_seconds for span in self.spans), default=0.0)

    @property
    def end_seconds(self) -> float:
        """When the last span ends; 0 without spans."""
        return max((span.end_seconds for span in self.spans), default=0.0)

    def to_json(self) -> str:
        """Return the trace as JSON text, spans as rows under one list of columns."""
        rows = [_SPAN_VALUES(span) for span in self.spans]
        counters = [
            {column: getattr(counter, column) for column in _COUNTER_COLUMNS}
            for counter in self.counters
        ]
        trace = {
            "version": FORMAT_VERSION,
            "name": self.name,
            "is_simulated": self.is_simulated,
            "metadata": dict(self.metadata),
            "comes_after": {str(task): after for task, after in self.comes_after.items()},
            "counters": counters,
            "span_columns": _SPAN_COLUMNS,
            "spans": rows,
        }
        return json.dumps(trace, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "trace") -> Self:
        """Return the trace in a JSON text; `where` begins the paths in messages.

        Raises:
            ConfigError: if the text is no trace of this version.
        """
        fields = Fields(parse_object(text, where=where), where=where, known=_KEYS)
        check_version(fields, FORMAT_VERSION)
        columns = fields.objects("span_columns")
        if set(columns) - set(_SPAN_COLUMNS) or len(set(columns)) != len(columns):
            _refuse(fields.path("span_columns"), f"is {columns!r}")
        comes_after = fields.value("comes_after")
        metadata = fields.value("metadata")
        if not isinstance(comes_after, dict) or not isinstance(metadata, dict):
            _refuse(where, "has no object as comes_after or as metadata")
        try:
            return cls(
                name=fields.text("name"),
                is_simulated=fields.truth("is_simulated"),
                spans=tuple(_span_from(columns, row) for row in fields.objects("spans")),
                counters=tuple(_counter_from(one) for one in fields.objects("counters")),
                comes_after={
                    TaskId(int(task)): tuple(TaskId(int(other)) for other in after)
                    for task, after in comes_after.items()
                },
                metadata={str(key): str(value) for key, value in metadata.items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{where} is not a trace",
                why=f"a span, a counter or a dependency is damaged ({error})",
                remedy="record or simulate it again",
            ) from error

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Return the trace in a JSON file.

        Raises:
            ConfigError: if the file cannot be read or is no trace.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(
                f"the trace file {path} cannot be read",
                why=reason or str(error),
                remedy="give the path of a trace written by lohan",
            ) from error
        return cls.from_json(text, where=str(path))


_SPAN_COLUMNS = tuple(Span.__dataclass_fields__)
_SPAN_VALUES = attrgetter(*_SPAN_COLUMNS)
_COUNTER_COLUMNS = tuple(Counter.__dataclass_fields__)
_KEYS = (
    "version",
    "name",
    "is_simulated",
    "metadata",
    "comes_after",
    "counters",
    "span_columns",
    "spans",
)


def _refuse(where: str, fact: str) -> NoReturn:
    raise ConfigError(
        f"{where} {fact}", why="it is not a trace", remedy="record or simulate it again"
    )


def _span_from(columns: list[object], row: object) -> Span:
    values = dict(zip(cast(list[str], columns), cast(list[object], row), strict=True))
    values["lane"] = Lane(cast(str, values["lane"]))
    span = Span(**values)  # type: ignore[arg-type]
    numbers = (span.task, span.block, span.nbytes, span.step, span.rank)
    texts = (span.name, span.kind, span.waited_for)
    if not all(number is None or type(number) is int for number in numbers):
        raise TypeError(f"a number is expected in {row!r}")
    if not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError(f"a text is expected in {row!r}")
    return span


def _counter_from(found: object) -> Counter:
    values = dict(cast(dict[str, object], found))
    if set(values) != set(_COUNTER_COLUMNS):
        raise TypeError(f"a counter has {sorted(values)}")
    return Counter(
        tier=Tier(cast(str, values["tier"])),
        at_seconds=tuple(float(at) for at in cast(list[float], values["at_seconds"])),
        used_bytes=tuple(int(used) for used in cast(list[int], values["used_bytes"])),
        budget_bytes=cast(int | None, values["budget_bytes"]),
        rank=cast(int, values["rank"]),
    )
