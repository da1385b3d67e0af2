"""What only the engines with native threads can get wrong."""

import errno
import gc
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from lohan import _native
from lohan.errors import ConfigError, DoesNotFit, HardwareError, ScheduleError, StorageError
from lohan.ssd import (
    Access,
    BufferPool,
    DriveId,
    DriveSettings,
    IoEngine,
    Priority,
)
from lohan.ssd.engines import engine as native_engine
from support.ssd_engines import NATIVE, PAGE, Bench, make_engine, nothing_leaks, random_bytes

MIB = 2**20


@pytest.fixture(params=NATIVE)
def bench(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Bench]:
    with nothing_leaks():
        settings = DriveSettings(max_requests=4, max_bytes=MIB, block_bytes=4 * PAGE)
        bench = Bench(make_engine(request.param), str(tmp_path / "f"), settings, 4 * MIB)
        yield bench
        bench.close()


class Stalled:
    """A request that gets nowhere for about a minute, unless it is let go.

    Its blocks go one at a time, and each is refused (EAGAIN) almost as often as a block may be: the
    engine tries again about every millisecond.
    """

    NUM_BLOCKS, NUM_REFUSALS = 60, 990

    def __init__(self, bench: Bench, operation: str, fill: npt.NDArray[np.uint8] | int = 0) -> None:
        engine = bench.engine
        assert isinstance(engine, IoEngine)
        self._engine = engine
        one_by_one = DriveSettings(max_requests=1, max_bytes=PAGE, block_bytes=PAGE)
        self._drive = engine.add_drive(one_by_one)
        file = engine.open_file(bench.path, drive=self._drive)
        for block in range(self.NUM_BLOCKS):
            first = block * (self.NUM_REFUSALS + 1) + 1
            for attempt in range(first, first + self.NUM_REFUSALS):
                engine.replace_result(self._drive, attempt, -errno.EAGAIN)
        nbytes = self.NUM_BLOCKS * PAGE
        self.buffer = bench.buffer(nbytes, fill)
        start = getattr(engine, f"start_{operation}")
        self.ticket = start(file, 0, self.buffer.address, nbytes, Priority.COMPUTE_WAITS)
        engine.close_file(file)

    def fail(self) -> None:
        """The next attempt fails for good."""
        self._engine.replace_result(self._drive, 1, -errno.EIO)

    def finish(self) -> None:
        """Every attempt from now on is what it is: refusals were told after the bytes had moved."""
        while not self._engine.is_done(self.ticket):
            self._engine.replace_result(self._drive, 1, PAGE)


def test_requests_go_on_while_a_thread_keeps_the_interpreter_busy(bench: Bench) -> None:
    buffer = bench.buffer(4 * MIB)
    engine = bench.engine
    ticket = engine.start_read(bench.file, 0, buffer.address, 4 * MIB, Priority.COMPUTE_WAITS)
    # The interpreter is never given up here: the engine's threads need nothing from it.
    while not engine.is_done(ticket):
        pass
    assert engine.counters(bench.drive).num_blocks == 4 * MIB // (4 * PAGE)


def test_a_wait_lets_other_threads_run(bench: Bench) -> None:
    stalled = Stalled(bench, "read")
    is_waiting, errors = threading.Event(), []

    def wait() -> None:
        is_waiting.set()
        try:
            bench.engine.wait(stalled.ticket)
        except StorageError as error:
            errors.append(error.errno)

    thread = threading.Thread(target=wait)
    before = sys.getswitchinterval()
    # Whoever has the interpreter keeps it until it waits: the thread is inside its wait, or would
    # keep the interpreter for as long as the request takes, when this one goes on.
    sys.setswitchinterval(1000)
    try:
        thread.start()
        is_waiting.wait()
        assert not bench.engine.is_done(stalled.ticket)
        stalled.fail()
    finally:
        sys.setswitchinterval(before)
    thread.join()
    assert errors == [errno.EIO]


def test_a_forked_child_is_refused_and_does_no_harm(bench: Bench) -> None:
    buffer = bench.buffer(PAGE, 5)

    def in_child(answers: "multiprocessing.connection.Connection") -> None:
        try:
            bench.engine.start_read(bench.file, 0, buffer.address, PAGE, Priority.PREFETCH)
            answers.send("accepted")
        except ScheduleError as error:
            answers.send(str(error))

    receiver, sender = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=in_child, args=(sender,))
    process.start()
    assert receiver.poll(200)
    assert "belongs to another process" in receiver.recv()
    process.join(200)
    assert process.exitcode == 0
    process.close()
    receiver.close()
    sender.close()
    engine = bench.engine
    engine.wait(engine.start_write(bench.file, 0, buffer.address, PAGE, Priority.PREFETCH))


def test_ctrl_c_ends_a_wait_and_loses_no_ticket(bench: Bench) -> None:
    content = random_bytes(Stalled.NUM_BLOCKS * PAGE)
    stalled = Stalled(bench, "write", content)
    engine = bench.engine

    def wait() -> None:
        # Here, because a signal may come as soon as the timer is set.
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        engine.wait(stalled.ticket)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not engine.is_done(stalled.ticket)
    stalled.finish()
    engine.wait(stalled.ticket)
    assert pathlib.Path(bench.path).read_bytes()[: content.nbytes] == content.tobytes()


def test_an_engine_nobody_closed_cleans_up_after_itself(tmp_path: pathlib.Path) -> None:
    for name in NATIVE:
        with nothing_leaks():
            engine = make_engine(name)
            bench = Bench(engine, str(tmp_path / name), DriveSettings(), MIB)
            buffer = bench.buffer(MIB, 9)
            ticket = engine.start_write(bench.file, 0, buffer.address, MIB, Priority.WRITE_BACK)
            bench.engine = None  # type: ignore[assignment]
            bench.file = None  # type: ignore[assignment]
            del engine
            gc.collect()
            assert ticket.native.is_done  # type: ignore[attr-defined]
            assert ticket.native.error_number == 0  # type: ignore[attr-defined]
            bench.pool.take_back(buffer)
            bench.pool.close()
            assert set((tmp_path / name).read_bytes()) == {9}


def test_a_filesystem_that_refuses_direct_io_gets_buffered_files(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    real_open = os.open

    def open_buffered(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            # As tmpfs did before Linux 6.6: the file is made, then the flag is refused.
            os.close(real_open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, mode)

    monkeypatch.setattr(native_engine.os, "open", open_buffered)
    engine = bench.engine
    file = engine.create_file(str(tmp_path / "buffered"), drive=bench.drive)
    assert file.access is Access.BUFFERED
    buffer, target = bench.buffer(MIB, random_bytes(MIB)), bench.buffer(MIB)
    engine.wait(engine.start_write(file, 0, buffer.address, MIB, Priority.WRITE_BACK))
    engine.wait(engine.start_flush(file))
    engine.wait(engine.start_read(file, 0, target.address, MIB, Priority.PREFETCH))
    assert np.array_equal(buffer.array(), target.array())
    engine.close_file(file)


@pytest.mark.parametrize(
    "options",
    [
        {"max_requests": 0},
        {"max_requests": 5000},
        {"block_bytes": 0},
        {"block_bytes": 4097},
        {"block_bytes": 2**31},
        {"max_bytes": 0},
        {"fairness_bytes": 0},
    ],
)
def test_impossible_drive_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        DriveSettings(**options)  # type: ignore[arg-type]


def test_io_uring_that_is_refused_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_engine._native, "probe_uring", lambda: errno.EPERM)
    with pytest.raises(PermissionError):
        IoEngine(is_uring=True)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
def test_a_hundred_thousand_requests_leave_nothing_behind(bench: Bench) -> None:
    engine, file = bench.engine, bench.file
    buffer = bench.buffer(64 * PAGE, 1)

    def cycle(count: int) -> None:
        for start in range(0, count, 500):
            tickets = []
            for n in range(start, start + 500):
                begin = engine.start_write if n % 3 == 0 else engine.start_read
                place = n % 64 * PAGE
                tickets.append(begin(file, place, buffer.address + place, PAGE, Priority(n % 4)))
            for ticket in tickets:
                engine.wait(ticket)

    cycle(5_000)
    before = resident_bytes()
    with nothing_leaks():
        cycle(100_000)
    assert resident_bytes() - before < 4 * MIB
    counters = engine.counters(bench.drive)
    assert counters.num_started == counters.num_finished == 105_000
    assert counters.num_failed == 0


def test_files_and_drives_of_another_engine_are_refused(bench: Bench) -> None:
    other = make_engine(bench.engine.name)
    try:
        buffer = bench.buffer(PAGE)
        with pytest.raises(ScheduleError, match="not its own"):
            other.start_read(bench.file, 0, buffer.address, PAGE, Priority.PREFETCH)
        with pytest.raises(ScheduleError, match="it has 0 drives"):
            other.open_file(bench.file.path, drive=bench.drive)
        with pytest.raises(ScheduleError, match="was asked for drive 7"):
            bench.engine.counters(DriveId(7))
    finally:
        other.close()


def test_a_drive_the_system_cannot_serve_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = IoEngine(is_uring=False)

    class Refusing:
        def add_drive(self, **_: object) -> int:
            raise OSError(errno.EMFILE, "eventfd: Too many open files")

    native = engine._native
    monkeypatch.setattr(engine, "_native", Refusing())
    with pytest.raises(HardwareError, match="Too many open files"):
        engine.add_drive(DriveSettings())
    native.close()


@pytest.mark.parametrize("nbytes", [2**63, 2**64 - 1, 2**64 - 4096])
def test_a_size_beyond_the_address_space_never_becomes_a_small_mapping(nbytes: int) -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        _native.AlignedMemory(nbytes, False)
    for too_much in (nbytes, 2**64, 2**80):
        with pytest.raises(DoesNotFit, match="Cannot allocate memory"):
            BufferPool("vast").allocate(too_much)


def test_memory_of_no_bytes_is_refused() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        _native.AlignedMemory(0, True)
