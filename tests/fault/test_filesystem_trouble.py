"""What filesystems do to a run: full, read-only, removed, replaced and cut short."""

import errno
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from lohan.errors import ShortTransfer, StorageError
from lohan.ssd import (
    BufferPool,
    DriveSettings,
    RunDirectories,
    StripedFile,
    add_drives,
    choose_engine,
)
from support.ssd_engines import NATIVE, PAGE, make_engine, nothing_leaks, random_bytes

CHUNK = 4 * PAGE


def run_in_private_mounts(code: str, mount_point: pathlib.Path) -> None:
    """Run code as root of a mount namespace of its own, so that no mount outlives the test."""
    options = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("unshare and mount are not installed")
    probe = ["unshare", *options, "mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mount_point)]
    refused = subprocess.run(probe, capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"this system permits no private mounts: {refused.stderr.strip()}")
    prelude = """
        import errno, os, pathlib, subprocess, sys
        from lohan.errors import *
        from lohan.ssd import *
        place = pathlib.Path(sys.argv[1])
        def mount(*options):
            subprocess.run(["mount", *options, str(place)], check=True)
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    done = subprocess.run(
        ["unshare", *options, sys.executable, "-c", script, str(mount_point)],
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr


def test_a_disk_too_small_is_refused_up_front_with_the_numbers(tmp_path: pathlib.Path) -> None:
    run_in_private_mounts(
        """
        mount("-t", "tmpfs", "-o", "size=8m", "none")
        engine, _ = choose_engine()
        run = RunDirectories.create([place], "full")
        try:
            StripedFile.create(run, name="f", engine=engine, capacity_bytes=64 << 20)
            sys.exit("was not refused")
        except OutOfSpace as error:
            assert "64.0 MiB are needed" in str(error), error
            assert "8.0 MiB are free" in str(error), error
            assert error.errno == errno.ENOSPC
        assert sorted(os.listdir(run.paths[0])) == ["lock"]
        run.close(should_delete=True)
        assert os.listdir(place) == []
        """,
        tmp_path,
    )


@pytest.mark.parametrize("name", NATIVE)
def test_a_disk_that_fills_up_under_a_write_says_so(tmp_path: pathlib.Path, name: str) -> None:
    run_in_private_mounts(
        f"""
        mount("-t", "tmpfs", "-o", "size=4m", "none")
        engine = IoEngine(is_uring={name == "io_uring"})
        drive = engine.add_drive(DriveSettings())
        file = engine.create_file(str(place / "f"), drive=drive)
        pool = BufferPool("p")
        with pool.allocate(8 << 20) as buffer:
            ticket = engine.start_write(file, 0, buffer.address, buffer.nbytes, Priority.WRITE_BACK)
            try:
                engine.wait(ticket)
                sys.exit("was not refused")
            except OutOfSpace as error:
                assert error.errno == errno.ENOSPC and error.path == str(place / "f"), error
                assert error.asked_bytes == 8 << 20 and error.got_bytes <= 4 << 20, error
        engine.close()
        """,
        tmp_path,
    )


def test_space_that_another_takes_while_files_are_made_leaves_nothing(
    tmp_path: pathlib.Path,
) -> None:
    run_in_private_mounts(
        """
        mount("-t", "tmpfs", "-o", "size=8m", "none")
        engine, _ = choose_engine()
        run = RunDirectories.create([place], "late")
        # Free space is checked, then taken by another: the reservation itself must refuse.
        engine.free_bytes = lambda directory: 1 << 40
        try:
            StripedFile.create(run, name="f", engine=engine, capacity_bytes=64 << 20)
            sys.exit("was not refused")
        except OutOfSpace as error:
            assert error.asked_bytes == 64 << 20, error
        assert sorted(os.listdir(run.paths[0])) == ["lock"]
        """,
        tmp_path,
    )


def test_a_read_only_filesystem_is_named(tmp_path: pathlib.Path) -> None:
    run_in_private_mounts(
        """
        mount("-t", "tmpfs", "-o", "ro", "none")
        for call in (check_directory, lambda path: RunDirectories.create([path], "r")):
            try:
                call(place)
                sys.exit("was not refused")
            except StorageError as error:
                assert error.errno == errno.EROFS, error
                assert "read-only" in str(error), error
        """,
        tmp_path,
    )


def test_a_file_size_limit_is_named(tmp_path: pathlib.Path) -> None:
    engine, _ = choose_engine()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = RunDirectories.create([tmp_path], "limit")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(StorageError, match="ulimit -f") as caught:
            StripedFile.create(run, name="f", engine=engine, capacity_bytes=8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    run.close(should_delete=True)
    assert list(tmp_path.iterdir()) == []
    engine.close()


class Setup:
    def __init__(self, engine_name: str, root: pathlib.Path) -> None:
        self.directories = [root / "a", root / "b"]
        for directory in self.directories:
            directory.mkdir()
        self.engine = make_engine(engine_name)
        self.run = RunDirectories.create(self.directories, "trouble")
        self.file = StripedFile.create(
            self.run,
            name="f",
            engine=self.engine,
            capacity_bytes=8 * CHUNK,
            chunk_bytes=CHUNK,
            drives=add_drives(self.engine, self.run.paths, [DriveSettings(block_bytes=PAGE)] * 2),
        )
        self.extent = self.file.allocate(8 * CHUNK)
        self.pool = BufferPool("t")
        self.buffer = self.pool.allocate(8 * CHUNK)
        self.buffer.array()[:] = random_bytes(8 * CHUNK)
        self.write()

    def write(self) -> None:
        address, nbytes = self.buffer.address, self.buffer.nbytes
        self.file.start_write(self.extent, address=address, nbytes=nbytes).wait()

    def close(self) -> None:
        self.file.close(should_delete=True)
        self.run.close(should_delete=True)
        self.pool.take_back(self.buffer)
        self.pool.close()
        self.engine.close()


@pytest.fixture(params=NATIVE)
def setup(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Setup]:
    with nothing_leaks():
        setup = Setup(request.param, tmp_path)
        yield setup
        setup.close()


def test_a_file_cut_short_behind_our_back_is_named_with_its_numbers(setup: Setup) -> None:
    os.truncate(setup.file.paths[1], CHUNK + PAGE)
    ticket = setup.file.start_read(
        setup.extent, address=setup.buffer.address, nbytes=setup.buffer.nbytes
    )
    with pytest.raises(ShortTransfer, match="something truncated it") as caught:
        ticket.wait()
    error = caught.value
    assert error.path == setup.file.paths[1]
    assert (error.offset_bytes, error.asked_bytes, error.got_bytes) == (CHUNK, CHUNK, PAGE)


def test_a_directory_removed_mid_run_is_found_before_a_checkpoint_counts_on_it(
    setup: Setup,
) -> None:
    shutil.rmtree(setup.run.paths[0])
    setup.write()
    with pytest.raises(StorageError, match="removed or replaced") as caught:
        setup.file.start_flush()
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, setup.file.paths[0])


def test_a_file_put_in_place_of_ours_is_not_deleted(setup: Setup) -> None:
    path = pathlib.Path(setup.file.paths[0])
    path.rename(path.with_suffix(".moved"))
    path.write_text("not ours")
    with pytest.raises(StorageError, match="removed or replaced"):
        setup.file.start_flush()
    setup.file.close(should_delete=True)
    setup.run.close(should_delete=True)
    assert path.read_text() == "not ours"
    assert not pathlib.Path(setup.file.paths[1]).exists()
