"""Figures and the CPU update."""

import time

import pytest

from lohan.measure.figure import Figure, measure_rounds, repeat
from lohan.measure.updates import measure_updates
from support.timed_engine import HandClock


def test_a_figure_is_its_middle_sample() -> None:
    figure = Figure(samples=(3.0, 100.0, 4.0))
    assert figure.per_second == 4
    assert figure.spread == pytest.approx(97 / 4)


def test_work_is_repeated_until_the_time_is_over() -> None:
    clock = HandClock()

    def work() -> float:
        clock.advance(0.25)
        return 10

    assert repeat(work, seconds=1, clock=clock) == pytest.approx(40)
    assert clock.seconds == 1
    assert repeat(work, seconds=0, clock=clock) == pytest.approx(40)
    assert measure_rounds(work, seconds=0.5, clock=clock).samples == (40, 40, 40)


def test_a_clock_that_stands_still_ends_all_the_same() -> None:
    assert repeat(lambda: 1.0, seconds=1, clock=lambda: 0.0) > 0


@pytest.mark.parametrize("num_threads", [1, 2])
def test_updates_are_timed(num_threads: int) -> None:
    found = measure_updates(
        num_threads=num_threads, seconds=1e-4, clock=time.perf_counter, num_parameters=2**16
    )
    assert found.per_second > 0


def test_updates_keep_to_the_room_there_is() -> None:
    clock, counted = HandClock(), []

    def tick() -> float:
        clock.advance(1.0)
        counted.append(1)
        return clock.seconds

    # One update in one or two ticks: the rate tells how many parameters there were.
    found = measure_updates(num_threads=1, seconds=0.5, clock=tick, room_bytes=14 * 2**17)
    assert found.per_second == pytest.approx(2**17 / 2)
