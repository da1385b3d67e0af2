"""Emulated drives on a clock moved by hand: requests end when a link of set rates would."""

from collections.abc import Iterator

import pytest

from lohan.errors import ConfigError, StorageError
from lohan.ssd import BufferPool, DriveSettings, IoFile, Priority
from support.memory_engine import MemoryEngine
from support.paced_engine import LinkRates, PacedEngine, PacedTicket
from support.timed_engine import HandClock

PAGE = 4096
READ, WRITE = 4 * PAGE, 2 * PAGE
"""Bytes per second."""


class Bench:
    """A paced engine over memory, one file, and memory for requests."""

    def __init__(self, *, is_duplex: bool) -> None:
        self.clock = HandClock()
        self.engine = PacedEngine(
            MemoryEngine(),
            LinkRates(
                read_bytes_per_second=READ, write_bytes_per_second=WRITE, is_duplex=is_duplex
            ),
            now=self.clock,
            sleep=self.clock.advance,
        )
        drive = self.engine.add_drive(DriveSettings())
        self.file: IoFile = self.engine.create_file("/paced/file", drive=drive)
        self.engine.resize(self.file, 64 * PAGE)
        self.pool = BufferPool("paced")
        self.buffer = self.pool.allocate(64 * PAGE)

    def read(self, pages: int, priority: Priority = Priority.PREFETCH) -> PacedTicket:
        return self.engine.start_read(self.file, 0, self.buffer.address, pages * PAGE, priority)

    def write(self, pages: int) -> PacedTicket:
        address = self.buffer.address
        return self.engine.start_write(self.file, 0, address, pages * PAGE, Priority.WRITE_BACK)

    def ends(self, *tickets: PacedTicket) -> list[float]:
        """When each of them is over, waiting for them in turn."""
        found = []
        for ticket in tickets:
            self.engine.wait(ticket)
            found.append(self.clock())
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(is_duplex=False)
    yield made
    made.pool.take_back(made.buffer)
    made.pool.close()
    made.engine.close()


def test_reads_follow_each_other_at_the_rate(bench: Bench) -> None:
    assert bench.ends(bench.read(4), bench.read(8)) == pytest.approx([1.0, 3.0])


def test_reads_and_writes_share_a_simplex_link(bench: Bench) -> None:
    # Alone 1 s and 3 s: together each goes at half speed until the read is over at 2 s.
    assert bench.ends(bench.read(4), bench.write(6)) == pytest.approx([2.0, 4.0])


def test_reads_and_writes_do_not_meet_on_a_duplex_link() -> None:
    bench = Bench(is_duplex=True)
    assert bench.ends(bench.read(4), bench.write(6)) == pytest.approx([1.0, 3.0])


def test_an_urgent_request_goes_before_those_that_wait_not_before_the_one_under_way(
    bench: Bench,
) -> None:
    first, second = bench.read(4), bench.read(4)
    bench.clock.advance(0.5)
    urgent = bench.read(4, Priority.COMPUTE_WAITS)
    assert bench.ends(first, urgent, second) == pytest.approx([1.0, 2.0, 3.0])


def test_time_in_which_nothing_was_asked_is_lost(bench: Bench) -> None:
    assert bench.ends(bench.read(4)) == pytest.approx([1.0])
    bench.clock.advance(5.0)
    assert bench.ends(bench.read(4)) == pytest.approx([7.0])


def test_a_request_that_waited_in_line_starts_when_its_turn_came_whoever_looks_when(
    bench: Bench,
) -> None:
    tickets = [bench.read(4) for _ in range(3)]
    bench.clock.advance(2.5)
    assert [bench.engine.is_done(ticket) for ticket in tickets] == [True, True, False]
    assert bench.ends(tickets[2]) == pytest.approx([3.0])


def test_bytes_are_really_moved(bench: Bench) -> None:
    bench.buffer.view[: 2 * PAGE] = b"\x07" * (2 * PAGE)
    bench.engine.wait(bench.write(2))
    bench.buffer.view[: 2 * PAGE] = bytes(2 * PAGE)
    bench.engine.wait(bench.read(2))
    assert bytes(bench.buffer.view[: 2 * PAGE]) == b"\x07" * (2 * PAGE)


def test_a_failure_is_told_without_waiting(bench: Bench) -> None:
    ticket = bench.engine.start_read(
        bench.file, 63 * PAGE, bench.buffer.address, 2 * PAGE, Priority.PREFETCH
    )
    with pytest.raises(StorageError):
        bench.engine.wait(ticket)
    assert bench.clock() == 0.0


def test_flushes_take_no_time_of_the_link(bench: Bench) -> None:
    assert bench.ends(bench.engine.start_flush(bench.file)) == [0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_that_cannot_be_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="above zero and finite"):
        LinkRates(read_bytes_per_second=rate, write_bytes_per_second=1.0, is_duplex=True)
