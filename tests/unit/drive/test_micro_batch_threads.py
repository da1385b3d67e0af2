"""A strand runs its body one step at a time and never leaves its thread behind."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from lohan.drive.micro_batch_threads import Strand


def counting(ask: Callable[[int], Any]) -> str:
    total = 0
    for number in range(3):
        total += ask(number)
    return f"total {total}"


def test_requests_and_replies_alternate_until_the_result() -> None:
    strand = Strand[int, str](counting, name="counting")
    assert strand.resume() == 0
    assert strand.resume(10) == 1
    assert strand.resume(20) == 2
    assert strand.resume(30) is None
    assert strand.is_over
    assert strand.result() == "total 60"


def test_only_one_thread_runs_at_a_time() -> None:
    running: list[int] = []
    most: list[int] = []

    def body(ask: Callable[[int], Any]) -> bool:
        for turn in range(20):
            running.append(1)
            most.append(len(running))
            running.pop()
            ask(turn)
        return True

    strands = [Strand[int, bool](body, name=f"strand {index}") for index in range(5)]
    while not all(strand.is_over for strand in strands):
        for strand in strands:
            running.append(1)
            running.pop()
            strand.resume()
    assert max(most) == 1


def test_what_the_body_raises_is_raised_where_it_was_resumed() -> None:
    def body(ask: Callable[[int], Any]) -> bool:
        ask(1)
        raise ValueError("from the body")

    strand = Strand[int, bool](body, name="raising")
    strand.resume()
    with pytest.raises(ValueError, match="from the body"):
        strand.resume()
    assert strand.is_over


def test_stopping_unwinds_the_body_and_ends_its_thread() -> None:
    unwound = threading.Event()

    def body(ask: Callable[[int], Any]) -> bool:
        try:
            ask(1)
        except Exception:
            return True  # a stop is no Exception, so this is not reached
        finally:
            unwound.set()
        return False

    threads = threading.active_count()
    strand = Strand[int, bool](body, name="stopped")
    strand.resume()
    strand.stop()
    strand.stop()
    assert unwound.is_set()
    assert threading.active_count() == threads


def test_a_body_that_goes_on_after_being_stopped_is_stopped_again() -> None:
    def body(ask: Callable[[int], Any]) -> bool:
        for turn in range(3):
            try:
                ask(turn)
            except BaseException:
                continue
        raise ValueError("raised while stopping")

    threads = threading.active_count()
    strand = Strand[int, bool](body, name="stubborn")
    strand.resume()
    strand.stop()
    assert strand.is_over
    assert threading.active_count() == threads


def test_a_strand_that_never_started_can_be_stopped() -> None:
    strand = Strand[int, str](counting, name="unborn")
    strand.stop()
    assert strand.is_over
