import errno
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from lohan.errors import ConfigError, OutOfSpace, StorageError
from lohan.ssd import RunDirectories
from support.ssd_engines import nothing_leaks

HOLD = """
import sys
from lohan.ssd import RunDirectories
run = RunDirectories.create(sys.argv[1:], "held")
print("ready", flush=True)
sys.stdin.read()
"""


def hold_elsewhere(*parents: pathlib.Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *map(str, parents)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_run_is_a_private_directory_with_a_note_in_its_lock(tmp_path: pathlib.Path) -> None:
    with nothing_leaks():
        run = RunDirectories.create([tmp_path], "one")
        path = tmp_path / "lohan-one"
        assert run.paths == (str(path),)
        assert path.stat().st_mode & 0o777 == 0o700
        assert (path / "lock").stat().st_mode & 0o777 == 0o600
        note = json.loads((path / "lock").read_text())
        assert (note["pid"], note["run_id"]) == (os.getpid(), "one")
        assert note.keys() == {"pid", "run_id", "host", "started"}
        run.close(should_delete=True)
        run.close(should_delete=True)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_in_one_directory_do_not_meet(tmp_path: pathlib.Path) -> None:
    first, second = (RunDirectories.create([tmp_path], name) for name in ("one", "two"))
    first.close(should_delete=True)
    assert [path.name for path in tmp_path.iterdir()] == ["lohan-two"]
    second.close(should_delete=True)


def test_a_run_that_exists_is_not_made_again(tmp_path: pathlib.Path) -> None:
    RunDirectories.create([tmp_path], "one").close()
    (tmp_path / "lohan-one" / "weights").write_text("precious")
    with pytest.raises(StorageError, match="exists already"):
        RunDirectories.create([tmp_path], "one")
    assert (tmp_path / "lohan-one" / "weights").read_text() == "precious"


def test_a_second_attach_is_refused_with_who_holds_the_run(tmp_path: pathlib.Path) -> None:
    holder = hold_elsewhere(tmp_path)
    try:
        with pytest.raises(StorageError, match=f"run held is held by process {holder.pid} on "):
            RunDirectories.attach([tmp_path], "held")
    finally:
        holder.communicate("")


def test_one_process_cannot_attach_twice_either(tmp_path: pathlib.Path) -> None:
    with nothing_leaks():
        run = RunDirectories.create([tmp_path], "one")
        with pytest.raises(StorageError, match=f"held by process {os.getpid()}"):
            RunDirectories.attach([tmp_path], "one")
        run.close()


def test_the_lock_of_a_killed_process_is_free(tmp_path: pathlib.Path) -> None:
    holder = hold_elsewhere(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    run = RunDirectories.attach([tmp_path], "held")
    assert json.loads((tmp_path / "lohan-held" / "lock").read_text())["pid"] == os.getpid()
    run.close(should_delete=True)


def test_a_run_is_made_in_all_directories_or_in_none(tmp_path: pathlib.Path) -> None:
    good, missing = tmp_path / "good", tmp_path / "missing"
    good.mkdir()
    with nothing_leaks(), pytest.raises(StorageError, match="could not be made"):
        RunDirectories.create([good, missing], "one")
    assert list(good.iterdir()) == []


def test_attaching_in_part_unlocks_what_it_locked_and_deletes_nothing(
    tmp_path: pathlib.Path,
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    RunDirectories.create([first], "one").close()
    with nothing_leaks(), pytest.raises(StorageError, match="missing"):
        RunDirectories.attach([first, second], "one")
    RunDirectories.attach([first], "one").close()


def test_what_others_put_there_stays(tmp_path: pathlib.Path) -> None:
    run = RunDirectories.create([tmp_path], "one")
    (tmp_path / "lohan-one" / "note").write_text("mine")
    run.close(should_delete=True)
    assert (tmp_path / "lohan-one" / "note").read_text() == "mine"


def test_a_symbolic_link_is_not_taken_for_a_run(tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "lohan-one").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="not a directory of this user"):
        RunDirectories.attach([tmp_path], "one")
    with pytest.raises(StorageError, match="exists already"):
        RunDirectories.create([tmp_path], "one")


@pytest.mark.parametrize("run_id", ["", "..", "a/b", ".hidden", "a b", "x" * 65, "a\n"])
def test_run_ids_that_are_no_file_names_are_refused(run_id: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="not a run id"):
        RunDirectories.create([tmp_path], run_id)


def test_a_run_needs_a_directory() -> None:
    with pytest.raises(ConfigError, match="has no SSD directory"):
        RunDirectories.create([], "one")


def test_a_damaged_lock_note_still_says_that_somebody_holds_it(tmp_path: pathlib.Path) -> None:
    run = RunDirectories.create([tmp_path], "one")
    (tmp_path / "lohan-one" / "lock").write_text("{")
    with pytest.raises(StorageError, match="held by another process"):
        RunDirectories.attach([tmp_path], "one")
    run.close()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_given_twice_is_named(is_link: bool, tmp_path: pathlib.Path) -> None:
    real, again = tmp_path / "real", tmp_path / "real"
    real.mkdir()
    if is_link:
        again = tmp_path / "link"
        again.symlink_to(real)
    with nothing_leaks():
        with pytest.raises(ConfigError, match="is given twice"):
            RunDirectories.create([real, again], "two")
        assert list(real.iterdir()) == []
        RunDirectories.create([real], "two").close()
        with pytest.raises(ConfigError, match="is given twice"):
            RunDirectories.attach([real, again], "two")


def test_a_disk_too_full_for_the_lock_leaves_nothing_behind(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lohan.ssd.runs.run_directory.os.pwrite", pwrite)
    with nothing_leaks(), pytest.raises(OutOfSpace):
        RunDirectories.create([tmp_path], "full")
    assert list(tmp_path.iterdir()) == []
