"""Reading back what `chrome_json` wrote."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.errors import ConfigError
from lohan.trace import Counter, Span, Trace, chrome_json, traces_of_chrome
from lohan.vocabulary import BlockId, Lane, TaskId, Tier

words = st.text(alphabet="ab (2)\u00e9\U0001f600<", max_size=9)
microseconds = st.integers(min_value=0, max_value=10**12)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start, length = draw(microseconds), draw(microseconds)
    return Span(
        lane=draw(st.sampled_from(list(Lane))),
        name=draw(words.map("x".__add__)),
        start_seconds=start * 1e-6,
        end_seconds=(start + length) * 1e-6,
        kind=draw(st.sampled_from(["forward", "P16", "odd kind"])),
        task=draw(st.none() | st.integers(0, 99).map(TaskId)),
        block=draw(st.none() | st.integers(0, 99).map(BlockId)),
        nbytes=draw(st.none() | st.integers(0, 2**60)),
        waited_for=draw(st.none() | words),
        step=draw(st.integers(0, 9)),
        rank=draw(st.integers(0, 2)),
    )


def as_rows(trace: Trace) -> list[tuple[object, ...]]:
    # A single rank is not written; times are those of the file, in whole nanoseconds.
    has_ranks = len({span.rank for span in trace.spans}) > 1
    return sorted(
        (
            span.lane,
            span.rank if has_ranks else 0,
            round(span.start_seconds * 1e9),
            round(span.end_seconds * 1e9),
            span.name,
            span.kind,
            str((span.task, span.block, span.nbytes, span.waited_for, span.step)),
        )
        for span in trace.spans
    )


@given(st.lists(spans(), max_size=8), st.booleans())
def test_spans_come_back_as_they_were(found: list[Span], is_simulated: bool) -> None:
    trace = Trace(name="a run", is_simulated=is_simulated, spans=tuple(found))
    (read,) = traces_of_chrome(chrome_json(trace))
    assert (read.name, read.is_simulated) == ("a run", is_simulated)
    assert as_rows(read) == as_rows(trace)


def test_memory_and_its_budget_come_back() -> None:
    counter = Counter(
        tier=Tier.RAM, at_seconds=(0.0, 0.5, 2.0), used_bytes=(1, 7, 3), budget_bytes=9
    )
    trace = Trace(
        name="run",
        is_simulated=False,
        spans=(Span(lane=Lane.GPU, name="x", start_seconds=0, end_seconds=2),),
        counters=(counter,),
        metadata={"machine": "one, two", "model": "m"},
    )
    (read,) = traces_of_chrome(chrome_json(trace))
    assert read.counters == (counter,)
    assert dict(read.metadata) == {"machine": "one, two", "model": "m"}


def test_two_traces_in_one_file_stay_apart() -> None:
    span = Span(lane=Lane.CPU, name="update", start_seconds=0, end_seconds=1)
    text = chrome_json(
        Trace(name="plan", is_simulated=True, spans=(span,)),
        Trace(name="run", is_simulated=False, spans=(span, span)),
    )
    assert [(t.name, t.is_simulated, len(t.spans)) for t in traces_of_chrome(text)] == [
        ("plan", True, 1),
        ("run", False, 2),
    ]


def test_events_of_other_programs_are_left_out() -> None:
    events = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 5, "args": {"name": "python main"}},
        {"ph": "X", "name": "f", "pid": 1, "tid": 5, "ts": 0, "dur": 1, "args": {}},
        {"ph": "i", "name": "mark", "pid": 1, "tid": 5, "ts": 0},
        {"ph": "C", "name": "clock", "pid": 1, "ts": 0, "args": {"hertz": 1}},
    ]
    (read,) = traces_of_chrome(json.dumps(events))
    assert read.spans == ()


LANE = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "gpu"}}
SPAN = {"ph": "X", "name": "f", "pid": 1, "tid": 1, "ts": 0, "dur": 1, "args": {}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        '{"traceEvents": 3}',
        "[3]",
        "[" * 100_000,
        json.dumps([LANE, {**SPAN, "ts": "soon"}]),
        json.dumps([LANE, {**SPAN, "dur": -1}]),
        json.dumps([LANE, {**SPAN, "dur": True}]),
        json.dumps([LANE, {**SPAN, "args": [1]}]),
        json.dumps([LANE, {key: value for key, value in SPAN.items() if key != "ts"}]),
        json.dumps([LANE, {**SPAN, "ts": float("nan")}]),
        json.dumps([LANE, {**SPAN, "ts": 10**400}]),
        json.dumps([LANE, SPAN])[:-20],
    ],
)
def test_damaged_text_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"trace\.json is not a trace"):
        traces_of_chrome(text, where="trace.json")
