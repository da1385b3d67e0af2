"""The summary of a trace: busy, idle, overlap, waits, checked by hand and by a slow judge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.trace import Counter, Span, Trace, summarise
from lohan.trace.rows import merged, overlap_seconds
from lohan.trace.summary import NO_MORE_WORK, NOT_RECORDED
from lohan.vocabulary import Lane, TaskId, Tier


def span(lane: Lane, start: float, end: float, **more: object) -> Span:
    named = {"name": "work", **more}
    return Span(lane=lane, start_seconds=start, end_seconds=end, **named)  # type: ignore[arg-type]


STEP = Trace(
    name="step",
    is_simulated=True,
    spans=(
        span(Lane.SSD_READ, 0, 2, task=TaskId(0), kind="P16", nbytes=4_000_000_000),
        span(Lane.SSD_READ, 2, 4, task=TaskId(1), kind="P16", nbytes=4_000_000_000),
        span(Lane.GPU, 2, 3, task=TaskId(2), kind="forward"),
        span(Lane.GPU, 4, 7, task=TaskId(3), kind="backward"),
        span(Lane.CPU, 8, 10, kind="update", waited_for="gradients"),
    ),
    counters=(Counter(tier=Tier.RAM, at_seconds=(0, 1), used_bytes=(7, 5)),),
    comes_after={TaskId(2): (TaskId(0),), TaskId(3): (TaskId(2), TaskId(1), TaskId(99))},
)


def test_busy_and_idle_fill_the_window() -> None:
    summary = summarise(STEP)
    assert summary.seconds == 10
    gpu = summary.lane("gpu")
    assert gpu is not None
    assert (gpu.busy_seconds, gpu.idle_seconds, gpu.busy_share) == (4, 6, 0.4)
    read = summary.lane("ssd_read")
    assert read is not None
    assert (read.moved_bytes, read.moved_bytes_per_second) == (8_000_000_000, 2e9)
    assert summary.lane("peer") is None
    assert summary.peak_bytes == {Tier.RAM: 7}


def test_a_wait_is_put_down_to_the_dependency_that_ended_last_or_to_what_the_span_says() -> None:
    summary = summarise(STEP)
    waits = {lane.label: lane.waited_seconds for lane in summary.lanes}
    # Idle 0-2 and 3-4 for weights, then 7-10 with nothing left to do.
    assert waits["gpu"] == {"ssd_read P16": 3, NO_MORE_WORK: 3}
    assert waits["cpu"] == {"gradients": 8}
    assert waits["ssd_read"] == {NO_MORE_WORK: 6}


def test_an_idle_stretch_after_its_dependencies_ended_is_not_blamed_on_them() -> None:
    trace = Trace(
        name="late",
        is_simulated=False,
        spans=(
            span(Lane.SSD_READ, 0, 1, task=TaskId(0)),
            span(Lane.GPU, 0, 2),
            span(Lane.GPU, 3, 4, task=TaskId(1)),
        ),
        comes_after={TaskId(1): (TaskId(0),)},
    )
    gpu = summarise(trace).lane("gpu")
    assert gpu is not None
    assert gpu.waited_seconds == {NOT_RECORDED: 1}


def test_dependencies_hold_within_a_step() -> None:
    trace = Trace(
        name="two steps",
        is_simulated=False,
        spans=(
            span(Lane.SSD_READ, 0, 1, task=TaskId(0), step=0),
            span(Lane.GPU, 1, 2, task=TaskId(1), step=0),
            span(Lane.SSD_READ, 3, 5, task=TaskId(0), step=1),
            span(Lane.GPU, 5, 6, task=TaskId(1), step=1),
        ),
        comes_after={TaskId(1): (TaskId(0),)},
    )
    gpu = summarise(trace).lane("gpu")
    assert gpu is not None
    assert gpu.waited_seconds == {"ssd_read work": 4}


def test_a_task_may_come_after_one_of_the_step_before_but_never_of_a_later_step() -> None:
    trace = Trace(
        name="overlap into the next step",
        is_simulated=True,
        spans=(
            span(Lane.CPU, 0, 3, task=TaskId(5), step=0, kind="update"),
            span(Lane.GPU, 0, 1, task=TaskId(4), step=0),
            span(Lane.GPU, 3, 4, task=TaskId(6), step=1),
            span(Lane.CPU, 4, 9, task=TaskId(5), step=2, kind="update"),
        ),
        comes_after={TaskId(6): (TaskId(5),), TaskId(4): (TaskId(5),)},
    )
    gpu = summarise(trace, end_seconds=4).lane("gpu")
    assert gpu is not None
    assert gpu.waited_seconds == {"cpu update": 2}


def test_overlap_counts_time_in_which_both_are_busy() -> None:
    overlap = summarise(STEP).overlap_seconds
    assert overlap["gpu", "ssd_read"] == overlap["ssd_read", "gpu"] == 1
    assert overlap["gpu", "cpu"] == 0


def test_a_window_cuts_spans_and_counts_bytes_by_the_part_inside() -> None:
    summary = summarise(STEP, start_seconds=1, end_seconds=3)
    read, gpu = summary.lane("ssd_read"), summary.lane("gpu")
    assert read is not None
    assert gpu is not None
    assert (read.busy_seconds, read.moved_bytes) == (2, 4_000_000_000)
    assert (gpu.busy_seconds, gpu.idle_seconds) == (1, 1)
    assert gpu.waited_seconds == {"ssd_read P16": 1}
    cpu = summary.lane("cpu")
    assert cpu is not None
    assert (cpu.num_spans, cpu.busy_share, cpu.waited_seconds) == (0, 0, {"gradients": 2})


def test_spans_in_flight_together_on_one_lane_count_once() -> None:
    spans = (span(Lane.SSD_WRITE, 0, 4), span(Lane.SSD_WRITE, 1, 2), span(Lane.SSD_WRITE, 3, 6))
    lane = summarise(Trace(name="t", is_simulated=False, spans=spans)).lane("ssd_write")
    assert lane is not None
    assert (lane.busy_seconds, lane.idle_seconds) == (6, 0)


def test_lanes_of_several_gpus_are_told_apart() -> None:
    spans = (span(Lane.GPU, 0, 4, rank=0), span(Lane.GPU, 1, 2, rank=1), span(Lane.CPU, 0, 1))
    summary = summarise(Trace(name="t", is_simulated=False, spans=spans))
    assert [lane.label for lane in summary.lanes] == ["gpu 0", "gpu 1", "cpu 0"]


def test_an_empty_trace_has_an_empty_summary() -> None:
    summary = summarise(Trace(name="empty", is_simulated=True, spans=()))
    assert summary.lanes == ()
    assert "empty (simulated): 0 s" in summary.to_text()


def test_the_text_shows_every_lane_its_share_and_its_waits() -> None:
    assert summarise(STEP).to_text() == (
        "step (simulated): 10.0 s\n"
        "\n"
        "lane       busy         idle  spans    moved  rate while busy  waited for\n"
        "gpu       4.0 s  40 %  6.0 s      2        -                -  "
        "end of its work 3.0 s, ssd_read P16 3.0 s\n"
        "ssd_read  4.0 s  40 %  6.0 s      2  7.5 GiB         2.0 GB/s  end of its work 6.0 s\n"
        "cpu       2.0 s  20 %  8.0 s      1        -                -  gradients 8.0 s\n"
        "\n"
        "overlap: share of a row's busy time in which the column was busy too\n"
        "           gpu  ssd_read  cpu\n"
        "gpu          .      25 %  0 %\n"
        "ssd_read  25 %         .  0 %\n"
        "cpu        0 %       0 %    .\n"
        "\n"
        "peak: RAM 7 B\n"
    )


TICKS = st.integers(0, 30)
PIECES = st.lists(st.tuples(TICKS, TICKS).map(sorted).map(tuple), max_size=12)


def ticks_of(pieces: list[tuple[int, int]]) -> set[int]:
    """The slow judge: the whole seconds covered, one by one."""
    return {tick for start, end in pieces for tick in range(start, end)}


@given(PIECES, PIECES)
def test_union_and_overlap_agree_with_counting_second_by_second(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    union_one, union_other = merged(sorted(one)), merged(sorted(other))
    assert sum(b - a for a, b in union_one) == len(ticks_of(one))
    assert overlap_seconds(union_one, union_other) == len(ticks_of(one) & ticks_of(other))


@given(PIECES, TICKS, TICKS)
def test_busy_idle_and_waits_add_up_in_any_window(
    pieces: list[tuple[int, int]], one: int, other: int
) -> None:
    start, end = sorted((one, other))
    spans = tuple(span(Lane.GPU, a, b) for a, b in pieces)
    trace = Trace(name="t", is_simulated=True, spans=spans)
    for lane in summarise(trace, start_seconds=start, end_seconds=end).lanes:
        assert lane.busy_seconds == len(ticks_of(pieces) & set(range(start, end)))
        assert lane.busy_seconds + lane.idle_seconds == pytest.approx(end - start)
        assert sum(lane.waited_seconds.values()) == pytest.approx(lane.idle_seconds)
