"""Traces as data: what they hold, that they do not change, and their JSON form."""

import json
import math
import pathlib
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from lohan.errors import ConfigError
from lohan.trace import Counter, Span, Trace
from lohan.vocabulary import BlockId, Lane, TaskId, Tier

TRACE = Trace(
    name="two tasks",
    is_simulated=True,
    spans=(
        Span(
            lane=Lane.SSD_READ,
            name="P16 block 3",
            start_seconds=0.0,
            end_seconds=0.1,
            kind="P16",
            task=TaskId(1),
            block=BlockId(3),
            nbytes=1000,
        ),
        Span(
            lane=Lane.GPU,
            name="forward block 3",
            start_seconds=0.1,
            end_seconds=1 / 3,
            task=TaskId(2),
            waited_for="ssd_read P16",
            step=4,
            rank=1,
        ),
    ),
    counters=(
        Counter(tier=Tier.RAM, at_seconds=(0.0, 0.1), used_bytes=(0, 1000), budget_bytes=2000),
    ),
    comes_after={TaskId(2): (TaskId(1),)},
    metadata={"machine": "paper-4090"},
)


def test_json_round_trip_is_exact() -> None:
    assert Trace.from_json(TRACE.to_json()) == TRACE
    assert json.loads(TRACE.to_json())["version"] == 1


def test_a_trace_pickles() -> None:
    assert pickle.loads(pickle.dumps(TRACE)) == TRACE


def test_a_trace_does_not_change() -> None:
    after = {TaskId(2): (TaskId(1),)}
    trace = Trace(name="t", is_simulated=True, spans=(), comes_after=after)
    after[TaskId(3)] = (TaskId(1),)
    assert dict(trace.comes_after) == {2: (1,)}
    with pytest.raises(TypeError):
        trace.comes_after[TaskId(3)] = ()  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        trace.name = "other"  # type: ignore[misc]


def test_beginning_and_end_span_everything_and_an_empty_trace_is_zero_long() -> None:
    assert (TRACE.start_seconds, TRACE.end_seconds) == (0.0, 1 / 3)
    empty = Trace(name="empty", is_simulated=False, spans=())
    assert (empty.start_seconds, empty.end_seconds) == (0.0, 0.0)
    assert Trace.from_json(empty.to_json()) == empty


def test_a_span_is_grouped_by_kind_or_by_the_first_word_of_its_name() -> None:
    assert [span.group for span in TRACE.spans] == ["P16", "forward"]
    assert TRACE.counters[0].peak_bytes == 1000


@pytest.mark.parametrize(
    ("start", "end"), [(2.0, 1.0), (math.nan, 1.0), (0.0, math.nan), (0.0, math.inf)]
)
def test_a_span_that_ends_before_it_begins_is_refused(start: float, end: float) -> None:
    with pytest.raises(ConfigError, match="the span 'x' on gpu lasts from"):
        Span(lane=Lane.GPU, name="x", start_seconds=start, end_seconds=end)


@pytest.mark.parametrize(
    ("at", "used"), [((0.0,), ()), ((1.0, 0.5), (1, 2)), ((math.nan,), (1,)), ((math.inf,), (1,))]
)
def test_a_counter_needs_rising_times_and_as_many_values(
    at: tuple[float, ...], used: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match="the counter of GPU"):
        Counter(tier=Tier.GPU, at_seconds=at, used_bytes=used)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(version=9),
        lambda t: t.update(more=1),
        lambda t: t.pop("spans"),
        lambda t: t.update(spans={}),
        lambda t: t.update(spans=[[1]]),
        lambda t: t.update(spans=[3]),
        lambda t: t["span_columns"].append("colour"),
        lambda t: t["span_columns"].append("lane"),
        lambda t: t["spans"][0].__setitem__(0, "nvme"),
        lambda t: t["spans"][0].__setitem__(2, "soon"),
        lambda t: t["spans"][0].__setitem__(2, None),
        lambda t: t["spans"][0].__setitem__(5, "task"),
        lambda t: t["spans"][0].__setitem__(1, 7),
        lambda t: t.update(comes_after=[1]),
        lambda t: t.update(comes_after={"a": [1]}),
        lambda t: t.update(comes_after={"1": 4}),
        lambda t: t.update(metadata=None),
        lambda t: t.update(counters=[1]),
        lambda t: t["counters"][0].pop("tier"),
        lambda t: t["counters"][0].update(tier="HBM"),
        lambda t: t["counters"][0].update(at_seconds=[1.0]),
    ],
)
def test_a_damaged_file_is_refused(change: Any, tmp_path: pathlib.Path) -> None:
    found = json.loads(TRACE.to_json())
    change(found)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError):
        Trace.load(path)


def test_a_file_is_loaded_and_a_missing_one_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(TRACE.to_json())
    assert Trace.load(path) == TRACE
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        Trace.load(tmp_path / "none.json")
