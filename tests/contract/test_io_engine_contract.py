"""One suite for every implementation of `IoEngine`: io_uring, threads, memory."""

import errno
import os
import pathlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from lohan.errors import ScheduleError, ShortTransfer, StorageError
from lohan.ssd import DriveSettings, Mixing, Priority
from support.ssd_engines import (
    MAKERS,
    PAGE,
    Bench,
    cut_short,
    make_engine,
    nothing_leaks,
    random_bytes,
)

MIB = 2**20
SETTINGS = {
    "one at a time": DriveSettings(max_requests=1, max_bytes=PAGE, block_bytes=PAGE),
    "small blocks": DriveSettings(max_requests=4, max_bytes=1 * MIB, block_bytes=16 * PAGE),
    "deep": DriveSettings(max_requests=32, max_bytes=64 * MIB, block_bytes=1 * MIB),
    "simplex": DriveSettings(
        max_requests=4,
        max_bytes=1 * MIB,
        block_bytes=8 * PAGE,
        mixing=Mixing.SIMPLEX,
        fairness_bytes=64 * PAGE,
    ),
}


@pytest.fixture(params=MAKERS)
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(engine_name: str, tmp_path: pathlib.Path) -> Iterator[Bench]:
    engine = make_engine(engine_name)
    with nothing_leaks():
        bench = Bench(engine, str(tmp_path / "file"), SETTINGS["small blocks"], 4 * MIB)
        yield bench
        bench.close()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE, 1 * MIB, 3 * MIB + PAGE])
def test_what_was_written_is_read_back(
    engine_name: str, settings: str, nbytes: int, tmp_path: pathlib.Path
) -> None:
    with nothing_leaks():
        bench = Bench(make_engine(engine_name), str(tmp_path / "f"), SETTINGS[settings], 4 * MIB)
        engine, offset = bench.engine, 5 * PAGE
        source = bench.buffer(nbytes, random_bytes(nbytes))
        target = bench.buffer(nbytes)
        engine.wait(
            engine.start_write(bench.file, offset, source.address, nbytes, Priority.WRITE_BACK)
        )
        engine.wait(
            engine.start_read(bench.file, offset, target.address, nbytes, Priority.COMPUTE_WAITS)
        )
        assert np.array_equal(source.array(), target.array())
        counters = engine.counters(bench.drive)
        assert (counters.written_bytes, counters.read_bytes) == (nbytes, nbytes)
        assert counters.num_started == counters.num_finished == 2
        bench.close()


@pytest.mark.parametrize("settings", SETTINGS)
def test_many_requests_of_both_directions_move_the_right_bytes(
    engine_name: str, settings: str, tmp_path: pathlib.Path
) -> None:
    with nothing_leaks():
        bench = Bench(make_engine(engine_name), str(tmp_path / "f"), SETTINGS[settings], 2 * MIB)
        engine, piece, count = bench.engine, 8 * PAGE, 32
        source = bench.buffer(piece * count, random_bytes(piece * count))
        target = bench.buffer(piece * count)
        writes = [
            engine.start_write(
                bench.file, n * piece, source.address + n * piece, piece, Priority(n % 4)
            )
            for n in range(count)
        ]
        reads = []
        for n, write in enumerate(writes):
            engine.wait(write)
            reads.append(
                engine.start_read(
                    bench.file, n * piece, target.address + n * piece, piece, Priority(n % 4)
                )
            )
        for read in reversed(reads):
            engine.wait(read)
        assert np.array_equal(source.array(), target.array())
        assert engine.counters(bench.drive).max_in_flight <= SETTINGS[settings].max_requests
        bench.close()


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_files_on_several_drives_do_not_mix(
    engine_name: str, num_files: int, tmp_path: pathlib.Path
) -> None:
    with nothing_leaks():
        engine = make_engine(engine_name)
        benches = []
        for n in range(num_files):
            (tmp_path / str(n)).mkdir()
            benches.append(Bench(engine, str(tmp_path / str(n) / "f"), SETTINGS["deep"], MIB))
        buffers = [b.buffer(MIB, random_bytes(MIB, seed=n)) for n, b in enumerate(benches)]
        tickets = [
            engine.start_write(b.file, 0, buffer.address, MIB, Priority.WRITE_BACK)
            for b, buffer in zip(benches, buffers, strict=True)
        ]
        for ticket in tickets:
            engine.wait(ticket)
        for n, bench in enumerate(benches):
            target = bench.buffer(MIB)
            engine.wait(engine.start_read(bench.file, 0, target.address, MIB, Priority.PREFETCH))
            assert np.array_equal(target.array(), random_bytes(MIB, seed=n))
        for bench in benches:
            bench.close()


@pytest.mark.parametrize(
    ("offset", "shift", "nbytes"),
    [(1, 0, PAGE), (512, 0, PAGE), (0, 8, PAGE), (0, 0, PAGE + 1), (0, 0, 0), (-PAGE, 0, PAGE)],
)
def test_unaligned_requests_are_refused_before_they_start(
    bench: Bench, offset: int, shift: int, nbytes: int
) -> None:
    buffer = bench.buffer(4 * PAGE)
    for start in (bench.engine.start_read, bench.engine.start_write):
        with pytest.raises(StorageError, match="multiples of 4096") as caught:
            start(bench.file, offset, buffer.address + shift, nbytes, Priority.PREFETCH)
        assert (caught.value.errno, caught.value.path) == (errno.EINVAL, bench.path)
        assert (caught.value.offset_bytes, caught.value.asked_bytes) == (offset, nbytes)
    assert bench.engine.counters(bench.drive).num_started == 0


def test_reading_past_the_end_is_a_short_transfer_with_the_bytes_there_were(bench: Bench) -> None:
    cut_short(bench.engine, bench.path, 3 * PAGE)
    buffer = bench.buffer(8 * PAGE)
    ticket = bench.engine.start_read(
        bench.file, PAGE, buffer.address, 8 * PAGE, Priority.COMPUTE_WAITS
    )
    with pytest.raises(ShortTransfer) as caught:
        bench.engine.wait(ticket)
    error = caught.value
    assert (error.path, error.offset_bytes) == (bench.path, PAGE)
    assert (error.asked_bytes, error.got_bytes) == (8 * PAGE, 2 * PAGE)
    assert bench.engine.counters(bench.drive).num_failed == 1


def test_a_file_that_ends_inside_a_page_is_a_short_transfer(bench: Bench) -> None:
    cut_short(bench.engine, bench.path, PAGE + 100)
    buffer = bench.buffer(2 * PAGE)
    ticket = bench.engine.start_read(bench.file, 0, buffer.address, 2 * PAGE, Priority.PREFETCH)
    with pytest.raises(ShortTransfer) as caught:
        bench.engine.wait(ticket)
    assert caught.value.got_bytes == PAGE + 100


def test_a_ticket_answers_the_same_to_every_thread_and_every_time(bench: Bench) -> None:
    cut_short(bench.engine, bench.path, 0)
    buffer = bench.buffer(PAGE)
    ticket = bench.engine.start_read(bench.file, 0, buffer.address, PAGE, Priority.PREFETCH)
    answers: list[type[BaseException]] = []

    def wait() -> None:
        for _ in range(3):
            try:
                bench.engine.wait(ticket)
            except StorageError as error:
                answers.append(type(error))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [ShortTransfer] * 12
    assert bench.engine.is_done(ticket)


def test_close_carries_out_what_was_started(engine_name: str, tmp_path: pathlib.Path) -> None:
    engine = make_engine(engine_name)
    with nothing_leaks():
        bench = Bench(engine, str(tmp_path / "f"), SETTINGS["one at a time"], 2 * MIB)
        buffer = bench.buffer(2 * MIB, random_bytes(2 * MIB))
        ticket = engine.start_write(bench.file, 0, buffer.address, 2 * MIB, Priority.BACKGROUND)
        engine.close()
        engine.close()
        assert engine.is_done(ticket)
        engine.wait(ticket)
        if engine_name != "memory":
            assert pathlib.Path(bench.path).read_bytes() == buffer.array().tobytes()
        bench.close()


def test_requests_after_close_are_refused(bench: Bench) -> None:
    buffer = bench.buffer(PAGE)
    bench.engine.close()
    with pytest.raises(ScheduleError, match="closed"):
        bench.engine.start_read(bench.file, 0, buffer.address, PAGE, Priority.PREFETCH)
    with pytest.raises(ScheduleError, match="closed"):
        bench.engine.start_flush(bench.file)
    with pytest.raises(ScheduleError, match="closed"):
        bench.engine.add_drive(DriveSettings())


def test_requests_on_a_closed_file_are_refused(bench: Bench) -> None:
    buffer = bench.buffer(PAGE)
    bench.engine.close_file(bench.file)
    bench.engine.close_file(bench.file)
    with pytest.raises(ScheduleError, match="file is closed"):
        bench.engine.start_write(bench.file, 0, buffer.address, PAGE, Priority.PREFETCH)


def test_a_file_may_be_closed_while_it_is_written_to(bench: Bench) -> None:
    buffer = bench.buffer(4 * MIB, random_bytes(4 * MIB))
    ticket = bench.engine.start_write(bench.file, 0, buffer.address, 4 * MIB, Priority.WRITE_BACK)
    bench.engine.close_file(bench.file)
    bench.engine.wait(ticket)
    again = bench.engine.open_file(bench.path, drive=bench.drive)
    target = bench.buffer(4 * MIB)
    bench.engine.wait(bench.engine.start_read(again, 0, target.address, 4 * MIB, Priority.PREFETCH))
    assert np.array_equal(target.array(), buffer.array())
    bench.engine.close_file(again)


def test_a_flush_ends_after_the_writes_started_before_it(bench: Bench) -> None:
    engine = bench.engine
    buffer = bench.buffer(4 * MIB, 7)
    writes = [
        engine.start_write(bench.file, n * MIB, buffer.address + n * MIB, MIB, Priority.BACKGROUND)
        for n in range(4)
    ]
    engine.wait(engine.start_flush(bench.file))
    assert all(engine.is_done(write) for write in writes)


def test_a_file_that_exists_is_not_made_again(bench: Bench) -> None:
    with pytest.raises(StorageError) as caught:
        bench.engine.create_file(bench.path, drive=bench.drive)
    assert caught.value.errno == errno.EEXIST


def test_a_missing_file_is_not_opened(bench: Bench) -> None:
    with pytest.raises(StorageError) as caught:
        bench.engine.open_file(bench.path + ".missing", drive=bench.drive)
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, bench.path + ".missing")


def test_resize_grows_and_cuts(bench: Bench) -> None:
    engine = bench.engine
    assert engine.file_bytes(bench.file) == 4 * MIB
    engine.resize(bench.file, 5 * MIB)
    assert engine.file_bytes(bench.file) == 5 * MIB
    engine.resize(bench.file, MIB)
    assert engine.file_bytes(bench.file) == MIB
    assert engine.free_bytes(os.path.dirname(bench.path)) > 0


def test_removing_a_file_says_whether_it_was_there(bench: Bench) -> None:
    assert bench.engine.is_in_place(bench.file)
    assert bench.engine.remove_file(bench.file)
    with pytest.raises(StorageError):
        bench.engine.open_file(bench.path, drive=bench.drive)


def test_things_of_another_engine_are_refused(bench: Bench) -> None:
    class Foreign:
        path, drive, access, asked_bytes = bench.path, bench.drive, bench.file.access, 0

    with pytest.raises(ScheduleError, match="belong to the engine that made them"):
        bench.engine.close_file(Foreign()) if bench.engine.name != "memory" else (
            bench.engine.file_bytes(Foreign())
        )
    with pytest.raises(ScheduleError, match="belong to the engine that made them"):
        bench.engine.wait(Foreign())
