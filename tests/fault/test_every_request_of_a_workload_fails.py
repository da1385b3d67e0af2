"""The N-th request of a workload goes wrong, for every N and every way: nothing is lost."""

import errno
import os
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from lohan.errors import Corrupt, OutOfSpace, ShortTransfer, StorageError
from lohan.ssd import (
    BufferPool,
    DriveId,
    DriveSettings,
    Operation,
    Priority,
    RunDirectories,
    StripedFile,
    add_drives,
)
from support.fault_engine import Damage, Delay, Fail, Fault, FaultEngine, Shorten
from support.ssd_engines import MAKERS, NATIVE, PAGE, make_engine, nothing_leaks, random_bytes

CHUNK = 4 * PAGE
EXTENT = 2 * CHUNK + PAGE
SETTINGS = DriveSettings(max_requests=2, max_bytes=8 * PAGE, block_bytes=2 * PAGE)


def run_workload(engine: FaultEngine, directories: list[pathlib.Path]) -> None:
    """Write two extents over two drives, flush, read all back verified, write one again."""
    run = RunDirectories.create(directories, "faults")
    pool = BufferPool("faults")
    file = None
    try:
        file = StripedFile.create(
            run,
            name="state",
            engine=engine,
            capacity_bytes=4 * EXTENT,
            chunk_bytes=CHUNK,
            drives=add_drives(engine, run.paths, [SETTINGS] * len(directories)),
        )
        extents = [file.allocate(EXTENT) for _ in range(2)]
        for n, extent in enumerate(extents):
            with pool.allocate(EXTENT) as buffer:
                buffer.array()[:] = random_bytes(EXTENT, seed=n)
                file.start_write(extent, address=buffer.address, nbytes=EXTENT).wait()
        file.start_flush().wait()
        buffers = [pool.allocate(EXTENT) for _ in extents]
        try:
            tickets = [
                file.start_read(e, address=b.address, nbytes=EXTENT, should_verify=True)
                for e, b in zip(extents, buffers, strict=True)
            ]
            for n, (ticket, buffer) in enumerate(zip(tickets, buffers, strict=True)):
                ticket.wait()
                assert np.array_equal(buffer.array(), random_bytes(EXTENT, seed=n))
        finally:
            # Closing waits for what is in flight: only then may the buffers go back.
            file.close()
            for buffer in buffers:
                pool.take_back(buffer)
    finally:
        if file is not None:
            file.close()
            for path in file.paths:
                pathlib.Path(path).unlink(missing_ok=True)
        run.close(should_delete=True)
        assert pool.in_use_bytes == 0
        pool.close()


@pytest.fixture
def roots() -> Iterator[list[pathlib.Path]]:
    """Two directories in RAM where possible: what is tested here is not the speed of fsync."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as root:
        yield make_directories(pathlib.Path(root))


def make_directories(root: pathlib.Path) -> list[pathlib.Path]:
    directories = [root / "ssd0", root / "ssd1"]
    for directory in directories:
        directory.mkdir(exist_ok=True)
    return directories


FAULTS: dict[str, tuple[Fault, type[StorageError] | None]] = {
    "input/output error": (Fail(errno=errno.EIO), StorageError),
    "disk full": (Fail(errno=errno.ENOSPC), OutOfSpace),
    "quota used up": (Fail(errno=errno.EDQUOT), OutOfSpace),
    "read-only": (Fail(errno=errno.EROFS), StorageError),
    "short": (Shorten(), ShortTransfer),
    "delayed": (Delay(), None),
    "damaged": (Damage(), Corrupt),
}


@pytest.mark.parametrize("engine_name", MAKERS)
@pytest.mark.parametrize("fault_name", FAULTS)
def test_a_fault_at_any_request_gives_its_error_and_loses_nothing(
    engine_name: str, fault_name: str, roots: list[pathlib.Path]
) -> None:
    fault, expected = FAULTS[fault_name]
    directories = roots
    clean = FaultEngine(make_engine(engine_name))
    run_workload(clean, directories)
    clean.close()
    assert clean.num_requests > 10
    for number in range(1, clean.num_requests + 1):
        with nothing_leaks():
            engine = FaultEngine(make_engine(engine_name), faults={number: fault})
            # A flush moves no bytes: it cannot be shortened or damaged.
            is_harmless = clean.tickets[number - 1].operation is Operation.FLUSH and isinstance(
                fault, Shorten | Damage
            )
            if expected is None or is_harmless:
                run_workload(engine, directories)
            else:
                with pytest.raises(expected) as caught:
                    run_workload(engine, directories)
                assert caught.value.path is not None
                if isinstance(fault, Fail):
                    assert caught.value.errno == fault.errno
            assert all(engine.is_done(ticket) for ticket in engine.tickets)
            counters = engine.counters(DriveId(0))
            assert counters.num_started == counters.num_finished
            engine.close()
            assert [list(directory.iterdir()) for directory in directories] == [[], []]


@pytest.mark.parametrize("engine_name", MAKERS)
def test_a_failure_while_files_are_made_leaves_nothing_behind(
    engine_name: str, roots: list[pathlib.Path]
) -> None:
    directories = roots
    clean = FaultEngine(make_engine(engine_name))
    run_workload(clean, directories)
    clean.close()
    for number in range(1, clean.num_setup_calls + 1):
        with nothing_leaks():
            engine = FaultEngine(
                make_engine(engine_name), setup_faults={number: Fail(errno=errno.ENOSPC)}
            )
            with pytest.raises(OutOfSpace):
                run_workload(engine, directories)
            engine.close()
            assert [list(directory.iterdir()) for directory in directories] == [[], []]


RESULTS: dict[str, tuple[int, type[StorageError] | None]] = {
    "EIO": (-errno.EIO, StorageError),
    "ENOSPC": (-errno.ENOSPC, OutOfSpace),
    "EINTR": (-errno.EINTR, None),
    "EAGAIN": (-errno.EAGAIN, None),
    "nothing": (0, ShortTransfer),
    "part of a page": (100, None),
    "one page": (PAGE, None),
}


@pytest.mark.parametrize("engine_name", NATIVE)
@pytest.mark.parametrize("result_name", RESULTS)
def test_any_result_of_the_kernel_at_any_block_is_judged(
    engine_name: str, result_name: str, roots: list[pathlib.Path]
) -> None:
    result, expected = RESULTS[result_name]
    num_blocks, nbytes = 6, 12 * PAGE
    for number in range(1, 2 * num_blocks + 1):
        with nothing_leaks():
            engine = make_engine(engine_name)
            pool = BufferPool("blocks")
            run = RunDirectories.create(roots[:1], "results")
            file = StripedFile.create(
                run,
                name="f",
                engine=engine,
                capacity_bytes=nbytes,
                drives=add_drives(engine, run.paths, [SETTINGS]),
            )
            extent = file.allocate(nbytes)
            with pool.allocate(nbytes) as source, pool.allocate(nbytes) as target:
                source.array()[:] = random_bytes(nbytes)
                engine.replace_result(DriveId(0), number, result)  # type: ignore[attr-defined]
                failures = []
                tickets = []
                for start, buffer in ((file.start_write, source), (file.start_read, target)):
                    ticket = start(extent, address=buffer.address, nbytes=nbytes)
                    tickets.append(ticket)
                    error = ticket.settle()
                    if error is not None:
                        failures.append(error)
                for error in failures:
                    assert error.asked_bytes == nbytes
                    assert error.got_bytes in range(0, nbytes, 2 * PAGE)
                assert [type(error) for error in failures] == ([expected] if expected else [])
                if not expected:
                    assert np.array_equal(source.array(), target.array())
                assert all(ticket.is_done() for ticket in tickets)
            counters = engine.counters(DriveId(0))
            assert counters.num_started == counters.num_finished
            assert counters.num_failed == len(failures)
            file.close(should_delete=True)
            run.close(should_delete=True)
            pool.close()
            engine.close()


@pytest.mark.parametrize("engine_name", NATIVE)
def test_a_drive_that_only_ever_says_try_again_fails_in_the_end(
    engine_name: str, tmp_path: pathlib.Path
) -> None:
    engine = make_engine(engine_name)
    drive = engine.add_drive(DriveSettings())
    file = engine.create_file(str(tmp_path / "f"), drive=drive)
    engine.resize(file, PAGE)
    for number in range(1, 1100):
        engine.replace_result(drive, number, -errno.EAGAIN)  # type: ignore[attr-defined]
    pool = BufferPool("again")
    with pool.allocate(PAGE) as buffer:
        ticket = engine.start_read(file, 0, buffer.address, PAGE, Priority.PREFETCH)
        with pytest.raises(StorageError) as caught:
            engine.wait(ticket)
    assert caught.value.errno == errno.EAGAIN
    engine.close_file(file)
    engine.close()
    pool.close()
