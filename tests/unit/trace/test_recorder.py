"""Recording: from any thread, in bounded memory, nothing at all when off."""

import threading

from lohan.trace import Recorder
from lohan.vocabulary import BlockId, Lane, TaskId, Tier


class HandClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_times_count_from_the_making_of_the_recorder() -> None:
    clock = HandClock()
    recorder = Recorder(clock=clock)
    clock.seconds += 1
    began = recorder.now()
    clock.seconds += 2
    recorder.record(
        Lane.GPU, "forward block 0", began, recorder.now(), "forward", TaskId(7), BlockId(0)
    )
    (span,) = recorder.trace("run").spans
    assert (span.start_seconds, span.end_seconds) == (1.0, 3.0)
    assert (span.task, span.block, span.kind, span.rank) == (7, 0, "forward", 0)
    assert not recorder.trace("run").is_simulated


def test_bytes_and_waits_are_kept() -> None:
    recorder = Recorder()
    recorder.record(Lane.SSD_READ, "P16", 0.0, 1.0, nbytes=42, waited_for="a slot")
    (recorded,) = recorder.trace("run").spans
    assert (recorded.nbytes, recorded.waited_for, recorded.rank) == (42, "a slot", 0)


def test_a_recorder_that_is_off_records_nothing_and_accepts_everything() -> None:
    recorder = Recorder(is_on=False)
    recorder.record(Lane.GPU, "x", 0.0, 1.0)
    recorder.sample(Tier.RAM, 1)
    trace = recorder.trace("run")
    assert trace.spans == ()
    assert trace.counters == ()


def test_spans_of_many_threads_are_all_there_in_order_of_time() -> None:
    recorder = Recorder()
    num_threads, num_spans = 8, 500
    together = threading.Barrier(num_threads)

    def work(index: int) -> None:
        together.wait()
        for number in range(num_spans):
            began = recorder.now()
            recorder.record(Lane.CPU, f"{index}", began, recorder.now(), task=TaskId(number))
            recorder.sample(Tier.RAM, number)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recorder.trace("meanwhile")
        recorder.last_spans(Lane.CPU)
    for thread in threads:
        thread.join()
    trace = recorder.trace("run")
    assert len(trace.spans) == num_threads * num_spans
    starts = [span.start_seconds for span in trace.spans]
    assert starts == sorted(starts)
    for index in range(num_threads):
        own = [span.task for span in trace.spans if span.name == f"{index}"]
        assert own == list(range(num_spans))
    assert len(trace.counters[0].used_bytes) == num_threads * num_spans


def test_threads_that_come_and_go_by_the_step_leave_their_spans_in_bounded_memory() -> None:
    recorder = Recorder(capacity_spans=50)

    def work(number: int) -> None:
        recorder.record(Lane.GPU, f"{number}", number, number + 1)

    for number in range(200):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()
    names = [span.name for span in recorder.trace("run").spans]
    assert 50 <= len(names) <= 52
    assert names == [f"{number}" for number in range(200 - len(names), 200)]
    assert "spans_kept" in recorder.trace("run").metadata


def test_only_the_newest_spans_are_kept_and_the_trace_says_so() -> None:
    recorder = Recorder(capacity_spans=3)
    for number in range(5):
        recorder.record(Lane.GPU, f"{number}", number, number + 1)
    trace = recorder.trace("run")
    assert [span.name for span in trace.spans] == ["2", "3", "4"]
    assert trace.metadata["spans_kept"] == "the newest 3 of each thread"


def test_the_last_spans_of_a_lane_tell_its_story() -> None:
    recorder = Recorder()
    for number in range(20):
        recorder.record(Lane.GPU, f"gpu {number}", number, number + 1)
        recorder.record(Lane.CPU, f"cpu {number}", number, number + 1)
    assert [span.name for span in recorder.last_spans(Lane.CPU, 2)] == ["cpu 18", "cpu 19"]
    assert len(recorder.last_spans(Lane.GPU)) == 10
    assert recorder.last_spans(Lane.GPU, 0) == ()
    assert recorder.last_spans(Lane.PEER) == ()


def test_memory_samples_become_a_counter_per_tier_with_its_budget() -> None:
    clock = HandClock()
    recorder = Recorder(clock=clock)
    for used_bytes in (10, 30, 20):
        recorder.sample(Tier.RAM, used_bytes)
        clock.seconds += 1
    recorder.sample(Tier.GPU, 5)
    trace = recorder.trace("run", budgets_bytes={Tier.RAM: 64})
    gpu, ram = trace.counters
    assert (gpu.tier, gpu.used_bytes, gpu.budget_bytes) == (Tier.GPU, (5,), None)
    assert (ram.at_seconds, ram.used_bytes, ram.budget_bytes) == ((0, 1, 2), (10, 30, 20), 64)
