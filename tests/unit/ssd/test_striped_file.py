import pathlib
import stat
import threading

import numpy as np
import pytest

from lohan.errors import (
    ConfigError,
    Corrupt,
    OutOfSpace,
    ScheduleError,
    StorageError,
)
from lohan.ssd import (
    DriveId,
    DriveSettings,
    StripedFile,
    add_drives,
)
from support.ssd_engines import MAKERS, PAGE, make_engine, nothing_leaks, random_bytes
from support.striped_rig import CHUNK, Rig, make_directories


@pytest.mark.parametrize("engine_name", MAKERS)
@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [7.0, 3.0, 3.5]])
def test_ranges_over_any_number_of_directories_come_back(
    engine_name: str, weights: list[float], tmp_path: pathlib.Path
) -> None:
    with nothing_leaks():
        directories = make_directories(tmp_path, len(weights))
        rig = Rig(make_engine(engine_name), directories, weights=weights)
        first, second = rig.file.allocate(5 * CHUNK + 1), rig.file.allocate(3 * CHUNK)
        rig.write(first, first.nbytes, seed=1)
        rig.write(second, second.nbytes, seed=2)
        assert rig.read(first, first.nbytes) == random_bytes(first.nbytes, 1).tobytes()
        assert rig.read(second, second.nbytes) == random_bytes(second.nbytes, 2).tobytes()
        middle = rig.read(first, 2 * CHUNK, offset_bytes=CHUNK + PAGE)
        expected = random_bytes(first.nbytes, 1).tobytes()
        assert middle == expected[CHUNK + PAGE : 3 * CHUNK + PAGE]
        rig.close()


def test_files_are_private_and_reserved_in_full(tmp_path: pathlib.Path) -> None:
    rig = Rig(make_engine("threads"), make_directories(tmp_path, 2))
    for path in map(pathlib.Path, rig.file.paths):
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert status.st_size == 8 * CHUNK
        assert status.st_blocks * 512 >= 8 * CHUNK
    rig.close()


def test_freed_extents_are_used_again(rig: Rig) -> None:
    file = rig.file
    first = file.allocate(10 * CHUNK)
    second = file.allocate(6 * CHUNK)
    with pytest.raises(OutOfSpace, match=r"0 B of 256\.0 KiB are free"):
        file.allocate(1)
    file.free(first)
    assert file.allocate(2 * CHUNK).offset_bytes == 0
    rig.write(second, second.nbytes, seed=3)
    third = file.allocate(8 * CHUNK)
    rig.write(third, 8 * CHUNK, seed=4)
    assert rig.read(third, 8 * CHUNK) == random_bytes(8 * CHUNK, 4).tobytes()
    assert rig.read(second, second.nbytes) == random_bytes(second.nbytes, 3).tobytes()


def test_freed_or_foreign_extents_are_refused(rig: Rig) -> None:
    extent = rig.file.allocate(CHUNK)
    rig.file.free(extent)
    with pytest.raises(ScheduleError, match="not allocated"):
        rig.file.free(extent)
    with pytest.raises(ScheduleError, match="not allocated"):
        rig.read(extent, CHUNK)


def test_requests_outside_the_extent_or_unaligned_are_refused(rig: Rig) -> None:
    extent = rig.file.allocate(2 * CHUNK)
    for nbytes, offset in ((3 * CHUNK, 0), (CHUNK, 2 * CHUNK), (0, 0), (PAGE, -PAGE)):
        with pytest.raises(ScheduleError, match="inside its extent"):
            rig.read(extent, nbytes, offset)
    with pytest.raises(StorageError, match="multiples of 4096"):
        rig.read(extent, 100)
    with pytest.raises(StorageError, match="multiples of 4096"):
        rig.file.start_write(extent, address=rig.source.address + 8, nbytes=PAGE)


def test_verified_reads_pass_in_any_pieces_that_end_at_chunks(rig: Rig) -> None:
    extent = rig.file.allocate(8 * CHUNK)
    rig.write(extent, 8 * CHUNK)
    whole = random_bytes(8 * CHUNK).tobytes()
    assert rig.read(extent, 8 * CHUNK, should_verify=True) == whole
    assert rig.read(extent, 2 * CHUNK, CHUNK, should_verify=True) == whole[CHUNK : 3 * CHUNK]


def test_a_changed_bit_is_found_with_its_place(rig: Rig) -> None:
    extent = rig.file.allocate(8 * CHUNK)
    rig.write(extent, 8 * CHUNK)
    rig.damage(1, CHUNK + 10)
    ticket = rig.file.start_read(
        extent, address=rig.target.address, nbytes=8 * CHUNK, should_verify=True
    )
    for _ in range(2):
        with pytest.raises(Corrupt, match="checksum") as caught:
            ticket.wait()
        assert (caught.value.path, caught.value.offset_bytes) == (rig.file.paths[1], CHUNK)
    with pytest.raises(Corrupt):
        rig.verify(extent)
    rig.read(extent, CHUNK, should_verify=True)


def test_a_range_without_whole_checksums_cannot_be_verified(rig: Rig) -> None:
    extent = rig.file.allocate(4 * CHUNK)
    with pytest.raises(StorageError, match="cannot be verified"):
        rig.read(extent, CHUNK, should_verify=True)
    rig.write(extent, 4 * CHUNK)
    rig.write(extent, PAGE, offset_bytes=PAGE)
    with pytest.raises(StorageError, match="cannot be verified"):
        rig.read(extent, CHUNK, should_verify=True)
    with pytest.raises(StorageError, match="cannot be verified"):
        rig.verify(extent)
    rig.read(extent, CHUNK, CHUNK, should_verify=True)


def test_a_freed_extent_takes_its_checksums_along(rig: Rig) -> None:
    extent = rig.file.allocate(2 * CHUNK)
    rig.write(extent, 2 * CHUNK)
    rig.file.free(extent)
    again = rig.file.allocate(2 * CHUNK)
    assert again == extent
    with pytest.raises(StorageError, match="cannot be verified"):
        rig.read(again, CHUNK, should_verify=True)


def test_checksums_can_be_left_out(tmp_path: pathlib.Path) -> None:
    rig = Rig(make_engine("threads"), make_directories(tmp_path, 1), should_checksum=False)
    extent = rig.file.allocate(CHUNK)
    rig.write(extent, CHUNK)
    assert rig.file.checksums.stretches() == ()
    rig.close()


@pytest.mark.parametrize("nbytes", [2 * PAGE, 3 * PAGE, 6 * PAGE, 64 * PAGE])
def test_an_extent_is_verified_through_a_buffer_of_any_size(rig: Rig, nbytes: int) -> None:
    extent = rig.file.allocate(5 * CHUNK + PAGE)
    rig.write(extent, extent.nbytes)
    rig.verify(extent, nbytes)
    rig.damage(0, 0)
    with pytest.raises(Corrupt):
        rig.verify(extent, nbytes)
    with pytest.raises(ConfigError, match="two pages are the least"):
        rig.verify(extent, PAGE)


def test_a_file_is_not_made_over_one_that_exists(rig: Rig) -> None:
    with pytest.raises(StorageError, match="it is there already"):
        StripedFile.create(rig.run, name="f", engine=rig.engine, capacity_bytes=CHUNK)
    extent = rig.file.allocate(CHUNK)
    rig.write(extent, CHUNK)


def test_lists_must_have_one_entry_per_directory(rig: Rig) -> None:
    for options in ({"weights": [1.0]}, {"drives": [DriveId(0)]}):
        with pytest.raises(ConfigError, match="for 2 SSD directories"):
            StripedFile.create(
                rig.run,
                name="g",
                engine=rig.engine,
                capacity_bytes=1,
                **options,  # type: ignore[arg-type]
            )


def test_directories_of_one_filesystem_and_files_of_one_run_share_a_queue(rig: Rig) -> None:
    drives = add_drives(rig.engine, rig.run.paths)
    assert drives[0] == drives[1]
    second = StripedFile.create(
        rig.run, name="g", engine=rig.engine, capacity_bytes=CHUNK, drives=drives
    )
    extent = second.allocate(CHUNK)
    address = rig.source.address
    second.start_write(extent, address=address, nbytes=CHUNK).wait()
    assert rig.engine.counters(drives[0]).num_finished == 1
    second.close(should_delete=True)
    with pytest.raises(ConfigError, match="1 drive settings are given for 2"):
        add_drives(rig.engine, rig.run.paths, [DriveSettings()])
    with pytest.raises(StorageError, match="an SSD directory failed"):
        add_drives(rig.engine, ["/missing"])


def test_a_range_is_not_used_again_before_its_request_was_waited_for(rig: Rig) -> None:
    extent = rig.file.allocate(4 * CHUNK)
    address = rig.source.address
    ticket = rig.file.start_write(extent, address=address, nbytes=2 * CHUNK)
    with pytest.raises(ScheduleError, match="a write was started over"):
        rig.file.start_write(extent, address=address, nbytes=CHUNK, offset_bytes=CHUNK)
    with pytest.raises(ScheduleError, match="an extent was freed over"):
        rig.file.free(extent)
    other = rig.file.start_write(extent, address=address, nbytes=CHUNK, offset_bytes=2 * CHUNK)
    ticket.wait()
    other.wait()
    rig.write(extent, 2 * CHUNK, offset_bytes=CHUNK)
    rig.file.free(extent)


def test_a_closed_file_refuses_everything(rig: Rig) -> None:
    extent = rig.file.allocate(CHUNK)
    rig.file.close(should_delete=True)
    rig.file.close(should_delete=True)
    for call in (
        lambda: rig.file.allocate(1),
        lambda: rig.file.free(extent),
        lambda: rig.read(extent, CHUNK),
        rig.file.start_flush,
    ):
        with pytest.raises(ScheduleError, match="after it was closed"):
            call()


def test_close_finishes_what_nobody_waited_for(rig: Rig) -> None:
    extent = rig.file.allocate(8 * CHUNK)
    ticket = rig.file.start_write(extent, address=rig.source.address, nbytes=8 * CHUNK)
    rig.file.close()
    assert ticket.is_done()
    ticket.wait()
    assert len(rig.file.checksums.stretches()) == 8
    for path in rig.file.paths:
        pathlib.Path(path).unlink(missing_ok=True)


def test_threads_share_a_striped_file(rig: Rig) -> None:
    extents = [rig.file.allocate(4 * CHUNK) for _ in range(4)]
    mistakes: list[int] = []

    def work(number: int) -> None:
        start = number * 4 * CHUNK
        for round_number in range(10):
            expected = random_bytes(4 * CHUNK, seed=100 * number + round_number)
            rig.source.array()[start : start + 4 * CHUNK] = expected
            for call, buffer in (
                (rig.file.start_write, rig.source),
                (rig.file.start_read, rig.target),
            ):
                call(extents[number], address=buffer.address + start, nbytes=4 * CHUNK).wait()
            if not np.array_equal(rig.target.array()[start : start + 4 * CHUNK], expected):
                mistakes.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mistakes == []
    for extent in extents:
        rig.verify(extent)
