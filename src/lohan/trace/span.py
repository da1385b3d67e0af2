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
from typing import Any, Self

from msgspec import to_builtins

from lohan.errors import ConfigError
from lohan.fields import Name, convert, read_json, read_text
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
        file = TraceFile(
            name=self.name,
            is_simulated=self.is_simulated,
            metadata=dict(self.metadata),
            comes_after=dict(self.comes_after),
            counters=self.counters,
            span_columns=list(_SPAN_COLUMNS),
            spans=[list(_SPAN_VALUES(span)) for span in self.spans],
        )
        fields = {"version": FORMAT_VERSION, **to_builtins(file, str_keys=True)}
        return json.dumps(fields, separators=(",", ":")) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "trace") -> Self:
        """Return the trace in a JSON text; `where` begins the paths in messages.

        Raises:
            ConfigError: if the text is no trace of this version.
        """
        file = read_json(text, TraceFile, where=where, version=FORMAT_VERSION, is_complete=True)
        columns = file.span_columns
        if set(columns) - set(_SPAN_COLUMNS) or len(set(columns)) != len(columns):
            raise ConfigError(
                f"{where}.span_columns is {columns!r}",
                why=f"each of {', '.join(_SPAN_COLUMNS)} may be in it once",
                remedy="record or simulate it again",
            )
        try:
            spans = [dict(zip(columns, row, strict=True)) for row in file.spans]
        except ValueError as error:
            raise ConfigError(
                f"{where}.spans has a row that is not {len(columns)} long",
                why="a row has a value for each of span_columns",
                remedy="record or simulate it again",
            ) from error
        return cls(
            name=file.name,
            is_simulated=file.is_simulated,
            spans=convert(spans, tuple[Span, ...], where=f"{where}.spans"),
            counters=file.counters,
            comes_after=file.comes_after,
            metadata=file.metadata,
        )

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Self:
        """Return the trace in a JSON file.

        Raises:
            ConfigError: if the file cannot be read or is no trace.
        """
        remedy = "give the path of a trace written by lohan"
        return cls.from_json(read_text(path, "the trace file", remedy=remedy), where=str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A trace as its file holds it."""

    name: Name
    is_simulated: bool
    metadata: dict[str, str]
    comes_after: dict[TaskId, tuple[TaskId, ...]]
    counters: tuple[Counter, ...]
    span_columns: list[str]
    spans: list[list[Any]]


_SPAN_COLUMNS = tuple(Span.__dataclass_fields__)
_SPAN_VALUES = attrgetter(*_SPAN_COLUMNS)
