"""One writer or several readers per range; no failure unsaid at closing; no way out of a run."""

import errno
import os
import pathlib
import threading
from collections.abc import Iterator

import pytest

from lohan.errors import CheckpointError, ConfigError, ScheduleError, StorageError
from lohan.ssd import (
    BufferPool,
    DriveSettings,
    IoEngine,
    RunDirectories,
    StripedFile,
    add_drives,
)
from lohan.ssd.checksums import ChecksumTable, Stretch
from support.memory_engine import MemoryEngine
from support.ssd_engines import NATIVE, PAGE, make_engine, nothing_leaks
from support.striped_rig import saved_of

CHUNK = 4 * PAGE


class Place:
    """A striped file over two directories of one queue, on an engine whose results can be set."""

    def __init__(self, engine_name: str, root: pathlib.Path) -> None:
        engine = make_engine(engine_name)
        assert isinstance(engine, IoEngine)
        self.engine = engine
        for name in ("a", "b"):
            (root / name).mkdir()
        self.run = RunDirectories.create([root / "a", root / "b"], "unit")
        self.drive, _ = add_drives(engine, self.run.paths, [DriveSettings(max_requests=2)] * 2)
        self.file = StripedFile.create(
            self.run,
            name="f",
            engine=engine,
            capacity_bytes=8 * CHUNK,
            chunk_bytes=CHUNK,
            drives=[self.drive] * 2,
        )
        self.pool = BufferPool("place")
        self.buffer = self.pool.allocate(4 * CHUNK)

    def close(self) -> None:
        self.file.close(should_delete=True)
        self.pool.take_back(self.buffer)
        self.pool.close()
        self.engine.close()
        self.run.close(should_delete=True)


@pytest.fixture(params=NATIVE)
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Place]:
    with nothing_leaks():
        place = Place(request.param, tmp_path)
        yield place
        place.close()


def test_a_read_over_a_write_in_flight_is_refused(place: Place) -> None:
    file, address = place.file, place.buffer.address
    extent = file.allocate(4 * CHUNK)
    write = file.start_write(extent, address=address, nbytes=2 * CHUNK)
    with pytest.raises(ScheduleError, match=r"a read was started .* while a write there"):
        file.start_read(extent, address=address, nbytes=PAGE, offset_bytes=2 * CHUNK - PAGE)
    beside = file.start_read(extent, address=address, nbytes=PAGE, offset_bytes=2 * CHUNK)
    also_beside = file.start_read(extent, address=address, nbytes=PAGE, offset_bytes=2 * CHUNK)
    for ticket in (write, beside, also_beside):
        ticket.wait()
    file.start_read(extent, address=address, nbytes=2 * CHUNK).wait()


def test_of_writes_to_one_range_from_many_threads_one_is_accepted(place: Place) -> None:
    file = place.file
    extent = file.allocate(4 * CHUNK)
    for _ in range(50):
        together = threading.Barrier(4)
        accepted, refused = [], []

        def write(
            together: threading.Barrier = together,
            accepted: list[object] = accepted,
            refused: list[object] = refused,
        ) -> None:
            together.wait()
            try:
                accepted.append(
                    file.start_write(extent, address=place.buffer.address, nbytes=4 * CHUNK)
                )
            except ScheduleError as error:
                refused.append(error)

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(accepted), len(refused)) == (1, 3)
        accepted[0].wait()


class SlowToStart(MemoryEngine):
    """Stands still inside `start_write` until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.has_started = threading.Event()
        self.may_go_on = threading.Event()

    def start_write(self, *request):  # type: ignore[no-untyped-def]
        self.has_started.set()
        assert self.may_go_on.wait(60)
        return super().start_write(*request)


def test_a_range_is_taken_before_its_request_is_started(tmp_path: pathlib.Path) -> None:
    engine = SlowToStart()
    run = RunDirectories.create([tmp_path], "unit")
    file = StripedFile.create(run, name="f", engine=engine, capacity_bytes=CHUNK)
    extent = file.allocate(CHUNK)
    with BufferPool("one").allocate(CHUNK) as buffer:
        tickets = []
        thread = threading.Thread(
            target=lambda: tickets.append(
                file.start_write(extent, address=buffer.address, nbytes=CHUNK)
            )
        )
        thread.start()
        assert engine.has_started.wait(60)
        with pytest.raises(ScheduleError, match="while a write there was not waited for"):
            file.start_read(extent, address=buffer.address, nbytes=PAGE)
        with pytest.raises(ScheduleError, match="an extent was freed"):
            file.free(extent)
        engine.may_go_on.set()
        thread.join()
        tickets[0].wait()
    file.close(should_delete=True)
    run.close(should_delete=True)


def test_a_refused_verification_leaves_its_range_free(place: Place) -> None:
    file, address = place.file, place.buffer.address
    extent = file.allocate(CHUNK)
    with pytest.raises(StorageError, match="cannot be verified"):
        file.start_read(extent, address=address, nbytes=CHUNK, should_verify=True)
    file.start_write(extent, address=address, nbytes=CHUNK).wait()


def test_closing_tells_of_a_failed_write_nobody_waited_for(place: Place) -> None:
    extent = place.file.allocate(CHUNK)
    place.engine.replace_result(place.drive, 1, -errno.EIO)
    place.file.start_write(extent, address=place.buffer.address, nbytes=CHUNK)
    with pytest.raises(StorageError, match="a write failed") as caught:
        place.file.close()
    assert caught.value.errno == errno.EIO
    for path in place.file.paths:
        os.unlink(path)


def test_closing_is_silent_about_reads_and_about_files_it_deletes(place: Place) -> None:
    extent = place.file.allocate(2 * CHUNK)
    place.engine.replace_result(place.drive, 1, -errno.EIO)
    place.engine.replace_result(place.drive, 2, -errno.EIO)
    place.file.start_read(extent, address=place.buffer.address, nbytes=2 * CHUNK)
    place.file.close(should_delete=True)


def test_a_file_that_cannot_be_deleted_does_not_keep_the_others_open(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_unlink, paths = os.unlink, place.file.paths

    def unlink(path: str) -> None:
        if path == paths[0]:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real_unlink(path)

    monkeypatch.setattr("lohan.ssd.engines.engine.os.unlink", unlink)
    with pytest.raises(StorageError, match="could not be deleted"):
        place.file.close(should_delete=True)
    monkeypatch.undo()
    assert [os.path.exists(path) for path in paths] == [True, False]
    os.unlink(paths[0])


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden", "x" * 65, "new\nline", "nul\0"])
def test_no_name_leads_out_of_the_run_directory(name: str, tmp_path: pathlib.Path) -> None:
    engine = MemoryEngine()
    run = RunDirectories.create([tmp_path], "unit")
    with pytest.raises(ConfigError, match="a striped file was given the name"):
        StripedFile.create(run, name=name, engine=engine, capacity_bytes=CHUNK)
    file = StripedFile.create(run, name="fine", engine=engine, capacity_bytes=CHUNK)
    saved = saved_of(file)
    file.close()
    with pytest.raises(CheckpointError, match="a striped file was given the name"):
        StripedFile.attach(run, engine=engine, **{**saved, "name": name})
    run.close(should_delete=True)


def test_verified_parts_do_not_replace_the_checksums_of_a_later_write() -> None:
    whole = Stretch(offset_bytes=0, nbytes=2 * CHUNK, checksum=1)
    parts = (
        Stretch(offset_bytes=0, nbytes=CHUNK, checksum=2),
        Stretch(offset_bytes=CHUNK, nbytes=CHUNK, checksum=3),
    )
    table = ChecksumTable((whole,))
    table.refine(whole, parts)
    assert table.stretches() == parts
    later = Stretch(offset_bytes=0, nbytes=CHUNK, checksum=4)
    table = ChecksumTable((whole,))
    table.record(later)
    table.refine(whole, parts)
    assert table.stretches() == (later,)
