"""The Chrome export against the trace-event format: what a phase must carry, how rows nest."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lohan.trace import Counter, Span, Trace, chrome_json
from lohan.vocabulary import Lane, TaskId, Tier


def span(lane: Lane, start: float, end: float, **more: object) -> Span:
    named = {"name": "work", **more}
    return Span(lane=lane, start_seconds=start, end_seconds=end, **named)  # type: ignore[arg-type]


def trace_of(*spans: Span, **more: Any) -> Trace:
    return Trace(**{"name": "run", "is_simulated": False, "spans": spans, **more})


def checked(text: str) -> list[dict[str, Any]]:
    """Return the events of a file after judging it by the rules of the trace-event format."""
    found = json.loads(text)
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = found["traceEvents"]
    arrows: dict[int, list[str]] = defaultdict(list)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float)
        match event["ph"]:
            case "M":
                key = {
                    "process_name": "name",
                    "thread_name": "name",
                    "process_labels": "labels",
                    "process_sort_index": "sort_index",
                    "thread_sort_index": "sort_index",
                }[event["name"]]
                kind = int if key == "sort_index" else str
                assert isinstance(event["args"][key], kind)
            case "X":
                assert event["dur"] >= 0
                assert isinstance(event["cat"], str)
                assert event["cat"]
                slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "C":
                assert all(isinstance(value, int | float) for value in event["args"].values())
            case "s" | "f":
                arrows[event["id"]].append(event["ph"])
                assert event["ph"] == "s" or event["bp"] == "e"
            case other:
                raise AssertionError(f"phase {other} is not written by us")
    for phases in arrows.values():
        assert phases == ["s", "f"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(slices)
    for row in slices.values():
        row.sort()
        for (_, end), (start, _) in pairwise(row):
            assert start >= end - 1e-3  # a row cannot show spans that cross
    for event in events:
        if event["ph"] in "sf":  # an arrow leaves from and arrives in a span of its row
            own = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in own)
    return events


def of_phase(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


def test_each_lane_is_a_named_row_in_the_order_of_the_vocabulary() -> None:
    events = checked(chrome_json(trace_of(span(Lane.CPU, 0, 1), span(Lane.GPU, 0, 2))))
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["gpu", "cpu"]
    (process,) = [e for e in events if e["name"] == "process_name"]
    assert process["args"]["name"] == "run (measured)"


def test_a_span_carries_its_facts_in_microseconds() -> None:
    work = span(Lane.GPU, 0.5, 0.75, task=TaskId(3), nbytes=12, waited_for="x", kind="forward")
    (event,) = of_phase(checked(chrome_json(trace_of(work))), "X")
    assert (event["ts"], event["dur"], event["cat"]) == (500_000, 250_000, "forward")
    assert event["args"] == {"task": 3, "bytes": 12, "waited_for": "x", "step": 0}


def test_arrows_join_dependent_spans_when_dependencies_are_known() -> None:
    spans = (
        span(Lane.SSD_READ, 0, 1, task=TaskId(0)),
        span(Lane.GPU, 1, 2, task=TaskId(1)),
        span(Lane.CPU, 2, 3, task=TaskId(2)),
    )
    after = {TaskId(1): (TaskId(0),), TaskId(2): (TaskId(0), TaskId(1), TaskId(77))}
    trace = trace_of(*spans, comes_after=after)
    events = checked(chrome_json(trace))
    assert len(of_phase(events, "s")) == len(of_phase(events, "f")) == 3
    assert not of_phase(checked(chrome_json(trace_of(*spans))), "s")


def test_predicted_and_measured_stand_side_by_side_as_two_processes() -> None:
    predicted = trace_of(span(Lane.GPU, 0, 1), name="p", is_simulated=True, metadata={"m": "gpt"})
    measured = trace_of(span(Lane.GPU, 0, 2), name="m")
    events = checked(chrome_json(predicted, measured))
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "p (simulated)", 2: "m (measured)"}
    (labels,) = [e for e in events if e["name"] == "process_labels"]
    assert labels["args"]["labels"] == "m: gpt"


def test_counters_show_each_tier_and_its_budget() -> None:
    counters = (
        Counter(tier=Tier.RAM, at_seconds=(0, 1), used_bytes=(5, 6), budget_bytes=9),
        Counter(tier=Tier.GPU, at_seconds=(0,), used_bytes=(1,)),
    )
    events = of_phase(checked(chrome_json(trace_of(span(Lane.GPU, 0, 2), counters=counters))), "C")
    assert [(e["name"], e["ts"], e["args"]["bytes"]) for e in events] == [
        ("RAM used bytes", 0, 5),
        ("RAM used bytes", 1e6, 6),
        ("RAM budget bytes", 0, 9),
        ("RAM budget bytes", 2e6, 9),
        ("GPU used bytes", 0, 1),
    ]


def test_counters_of_several_ranks_are_told_apart() -> None:
    counters = tuple(
        Counter(tier=Tier.GPU, at_seconds=(0,), used_bytes=(1,), rank=rank) for rank in (0, 1)
    )
    events = of_phase(checked(chrome_json(trace_of(counters=counters))), "C")
    assert [e["name"] for e in events] == ["GPU 0 used bytes", "GPU 1 used bytes"]


def test_an_empty_file_is_valid() -> None:
    assert checked(chrome_json()) == []
    checked(chrome_json(trace_of()))


TIMES = st.floats(0, 1e5, allow_nan=False)
SPANS = st.builds(
    lambda lane, ends, task, name: span(lane, *sorted(ends), task=TaskId(task), name=name),
    st.sampled_from(Lane),
    st.tuples(TIMES, TIMES),
    st.integers(0, 20),
    st.text(max_size=8),
)


@given(st.lists(SPANS, max_size=20))
def test_any_trace_makes_a_valid_file(spans: list[Span]) -> None:
    after = {TaskId(task): (TaskId(task - 1),) for task in range(1, 20)}
    events = checked(chrome_json(trace_of(*spans, comes_after=after)))
    assert len(of_phase(events, "X")) == len(spans)
