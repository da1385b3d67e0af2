"""Which part of a trace is drawn: its last whole steps, from time 0."""

from lohan.report.steady_steps import num_whole_steps, steady_steps
from lohan.trace import Counter, Span, Trace
from lohan.vocabulary import Lane, Tier


def span(step: int, start: float, end: float, lane: Lane = Lane.GPU) -> Span:
    return Span(lane=lane, name="work", start_seconds=start, end_seconds=end, step=step)


def trace_of(*spans: Span, counters: tuple[Counter, ...] = ()) -> Trace:
    return Trace(name="run", is_simulated=False, spans=spans, counters=counters)


FOUR = [span(n, 10.0 + 2 * n, 11.0 + 2 * n) for n in range(4)]


def test_the_last_whole_steps_are_taken_and_begin_at_zero() -> None:
    cut = steady_steps(trace_of(*FOUR), 2)
    assert (cut.first_step, cut.num_steps, cut.seconds) == (1, 2, 4.0)
    assert [(s.step, s.start_seconds) for s in cut.trace.spans] == [(1, 0.0), (2, 2.0)]
    assert cut.words == "steps 1 to 2"


def test_the_first_step_is_left_out_where_there_are_others() -> None:
    assert num_whole_steps(trace_of(*FOUR)) == 2
    assert num_whole_steps(trace_of(*FOUR[:2])) == 1
    assert steady_steps(trace_of(*FOUR[:2]), 2).words == "step 0"


def test_a_trace_of_one_step_is_shown_whole() -> None:
    cut = steady_steps(trace_of(span(0, 5, 6), span(0, 7, 9)), 2)
    assert (cut.seconds, len(cut.trace.spans)) == (4.0, 2)
    assert cut.words == "all that was recorded"


def test_work_of_other_lanes_is_cut_at_the_edges() -> None:
    update = span(1, 11.5, 15.0, Lane.CPU)
    late = span(2, 14.5, 99.0, Lane.SSD_WRITE)
    cut = steady_steps(trace_of(*FOUR, update, late), 1)
    times = {s.lane: (s.start_seconds, s.end_seconds) for s in cut.trace.spans}
    assert times == {Lane.GPU: (0, 1), Lane.CPU: (0, 1), Lane.SSD_WRITE: (0.5, 2)}


def test_memory_begins_with_what_held_before() -> None:
    counter = Counter(tier=Tier.RAM, at_seconds=(1.0, 13.0, 14.5, 50.0), used_bytes=(1, 2, 3, 4))
    (cut,) = steady_steps(trace_of(*FOUR, counters=(counter,)), 1).trace.counters
    assert (cut.at_seconds, cut.used_bytes) == ((0.0, 0.5), (2, 3))


def test_without_a_gpu_lane_any_lane_marks_the_steps() -> None:
    spans = [span(n, 2.0 * n, 2.0 * n + 1, Lane.CPU) for n in range(3)]
    assert steady_steps(trace_of(*spans), 1).seconds == 2.0


def test_steps_out_of_order_do_not_make_time_run_backwards() -> None:
    cut = steady_steps(trace_of(span(0, 0, 1), span(1, 8, 9), span(2, 4, 5), span(3, 9, 10)), 2)
    assert cut.seconds > 0
    assert all(s.start_seconds >= 0 for s in cut.trace.spans)


def test_nothing_recorded_is_nothing_cut() -> None:
    assert steady_steps(trace_of(), 2).trace.spans == ()
