"""Probe files: how long, where, and gone afterwards."""

import dataclasses
import os
import pathlib

import pytest

from lohan.errors import OutOfSpace, StorageError
from lohan.measure.probe_files import LEAST_BYTES, ProbeFiles, leftovers_in
from lohan.ssd import DriveSettings, check_directories, choose_engine
from lohan.units import GIB, MIB
from support.ssd_engines import nothing_leaks


def engine() -> object:
    return choose_engine()[0]


def small(*paths: pathlib.Path, most_bytes: int = 8 * MIB) -> ProbeFiles:
    return ProbeFiles(
        check_directories(paths),
        engine,  # type: ignore[arg-type]
        most_bytes=most_bytes,
        least_bytes=MIB,
        request_bytes=MIB,
    )


def test_files_are_private_whole_and_written(tmp_path: pathlib.Path) -> None:
    with small(tmp_path) as files:
        (directory,) = tmp_path.iterdir()
        assert directory.name.startswith("lohan-measure-")
        assert directory.stat().st_mode & 0o777 == 0o700
        probe = directory / "probe"
        assert probe.stat().st_mode & 0o777 == 0o600
        assert probe.stat().st_size == files.file_bytes == 8 * MIB
        assert probe.stat().st_blocks * 512 >= 8 * MIB
        content = probe.read_bytes()
        assert content[:MIB] != bytes(MIB)
        assert content[:MIB] != content[MIB : 2 * MIB]
        assert files.written_bytes == 8 * MIB
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_and_nothing_leaks(tmp_path: pathlib.Path) -> None:
    with nothing_leaks(), small(tmp_path) as files, files.open([DriveSettings()], [0]) as probe:
        ticket = files.start(probe, 0, 0, is_read=True)
        probe.engine.wait(ticket)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_inside_leaves_nothing(tmp_path: pathlib.Path) -> None:
    def interrupt() -> None:
        with small(tmp_path) as files, files.open([DriveSettings()], [0]) as probe:
            files.start(probe, 3, 0, is_read=False)
            raise KeyboardInterrupt

    with nothing_leaks(), pytest.raises(KeyboardInterrupt):
        interrupt()
    assert list(tmp_path.iterdir()) == []


def test_several_directories_share_the_bytes(tmp_path: pathlib.Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    with small(*paths) as files:
        assert files.file_bytes == 2 * MIB
        assert [len(list(path.iterdir())) for path in paths] == [1, 1, 1]
    assert [list(path.iterdir()) for path in paths] == [[], [], []]


def report(path: pathlib.Path, *, free: int, device: int = 1) -> object:
    (found,) = check_directories([path])
    return dataclasses.replace(found, free_bytes=free, device=device)


def file_bytes(*reports: object) -> int:
    from lohan.measure import probe_files

    return probe_files._file_bytes(reports, 2 * GIB, LEAST_BYTES, 16 * MIB)  # type: ignore[arg-type]


def test_at_most_what_is_asked_for_and_half_of_what_is_free(tmp_path: pathlib.Path) -> None:
    plenty, little = report(tmp_path, free=100 * GIB), report(tmp_path, free=300 * MIB, device=2)
    assert file_bytes(plenty) == 2 * GIB
    assert file_bytes(little) == 144 * MIB
    assert file_bytes(plenty, little) == 144 * MIB
    # Both on one filesystem share what is free there.
    same = report(tmp_path, free=300 * MIB)
    assert file_bytes(same, same) == 64 * MIB


def test_too_little_room_is_refused_with_the_numbers(tmp_path: pathlib.Path) -> None:
    with pytest.raises(OutOfSpace, match=r"100.0 MiB free, measuring it needs 128.0 MiB"):
        file_bytes(report(tmp_path, free=100 * MIB))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_vanishes_is_an_error(tmp_path: pathlib.Path) -> None:
    reports = check_directories([tmp_path])
    tmp_path.rmdir()
    with nothing_leaks(), pytest.raises(StorageError, match="could not be made"):
        ProbeFiles(reports, engine, most_bytes=GIB)  # type: ignore[arg-type]


def test_a_file_that_vanishes_is_an_error_when_it_is_opened(tmp_path: pathlib.Path) -> None:
    with small(tmp_path) as files:
        (directory,) = tmp_path.iterdir()
        os.unlink(directory / "probe")
        with (
            nothing_leaks(),
            pytest.raises(StorageError, match="could not be opened"),
            files.open([DriveSettings()], [0]),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_measurement_left_is_named_and_kept(tmp_path: pathlib.Path) -> None:
    left = tmp_path / "lohan-measure-0123"
    left.mkdir()
    (tmp_path / "lohan-run").mkdir()
    assert leftovers_in(check_directories([tmp_path])) == [str(left)]
    assert left.is_dir()
