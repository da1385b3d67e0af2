"""Finding the directories of runs, and leaving everything else alone."""

import json
import os
import pathlib

import pytest

from lohan.errors import StorageError
from lohan.ssd import RunDirectories, find_run_parts
from support.left_runs import held_elsewhere
from support.ssd_engines import nothing_leaks


def snapshot(root: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for path in sorted(root.rglob("*"))
    }


def test_a_left_run_is_found_with_what_it_takes(tmp_path: pathlib.Path) -> None:
    RunDirectories.create([tmp_path], "one").close()
    (tmp_path / "lohan-one" / "states.0.bin").write_bytes(b"x" * 10_000)
    before = snapshot(tmp_path)
    with nothing_leaks():
        found = find_run_parts([tmp_path])
    (part,) = found.parts
    assert (part.run_id, part.holder, part.note["pid"]) == ("one", None, os.getpid())
    assert [file.name for file in part.files] == ["lock", "states.0.bin"]
    assert sum(file.disk_bytes for file in part.files) >= 10_000
    assert found.remarks == ()
    assert snapshot(tmp_path) == before


def test_a_held_run_is_named_with_its_holder_and_stays_held(tmp_path: pathlib.Path) -> None:
    RunDirectories.create([tmp_path], "one").close()
    with held_elsewhere("one", tmp_path) as process:
        (part,) = find_run_parts([tmp_path]).parts
        assert part.holder is not None
        assert part.holder.startswith(f"process {process} on ")
        with pytest.raises(StorageError, match="is held by"):
            RunDirectories.attach([tmp_path], "one")
    (part,) = find_run_parts([tmp_path]).parts
    assert part.holder is None


def test_a_run_of_this_very_process_counts_as_held(tmp_path: pathlib.Path) -> None:
    run = RunDirectories.create([tmp_path], "one")
    (part,) = find_run_parts([tmp_path]).parts
    assert part.holder is not None
    run.close(should_delete=True)


def test_looking_does_not_take_the_lock_for_good(tmp_path: pathlib.Path) -> None:
    RunDirectories.create([tmp_path], "one").close()
    find_run_parts([tmp_path])
    RunDirectories.attach([tmp_path], "one").close(should_delete=True)
    assert find_run_parts([tmp_path]).parts == ()


def test_other_things_in_the_directory_are_no_runs(tmp_path: pathlib.Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "lohan-notes.txt").write_text("mine")
    (tmp_path / "lohan-").mkdir()
    (tmp_path / "lohan--x").mkdir()
    (tmp_path / "lohan").mkdir()
    found = find_run_parts([tmp_path])
    assert (found.parts, found.remarks) == ((), ())


def test_what_only_looks_like_a_run_is_left_alone_and_said(tmp_path: pathlib.Path) -> None:
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    RunDirectories.create([tmp_path], "real").close()
    (ssd / "lohan-link").symlink_to(tmp_path / "lohan-real")
    (ssd / "lohan-mine").mkdir()
    (ssd / "lohan-mine" / "thesis.tex").write_text("years of work")
    (ssd / "lohan-open").mkdir(mode=0o755)
    for name, content in (
        ("text", "not a note"),
        ("list", "[1]"),
        ("other", json.dumps({"run_id": "someone", "pid": 1, "host": "x", "started": "y"})),
    ):
        (ssd / f"lohan-{name}").mkdir(mode=0o700)
        (ssd / f"lohan-{name}" / "lock").write_text(content)
    (ssd / "lohan-linked-lock").mkdir(mode=0o700)
    (ssd / "lohan-linked-lock" / "lock").symlink_to(tmp_path / "lohan-real" / "lock")
    (ssd / "lohan-pipe").mkdir(mode=0o700)
    os.mkfifo(ssd / "lohan-pipe" / "lock")
    found = find_run_parts([ssd])
    assert found.parts == ()
    said = "\n".join(found.remarks)
    for name, reason in (
        ("link", "a symbolic link"),
        ("mine", "no lock file"),
        ("open", "no lock file"),
        ("text", "not written by lohan"),
        ("list", "not written by lohan"),
        ("other", "of another run ('someone')"),
        ("linked-lock", "not written by lohan"),
        ("pipe", "not written by lohan"),
    ):
        assert any(f"lohan-{name} is left alone" in r and reason in r for r in found.remarks), said


def test_a_run_stopped_before_it_wrote_its_note_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "lohan-early").mkdir(mode=0o700)
    (tmp_path / "lohan-note").mkdir(mode=0o700)
    (tmp_path / "lohan-note" / "lock").touch()
    assert [part.run_id for part in find_run_parts([tmp_path]).parts] == ["early", "note"]


def test_another_users_directory_is_left_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectories.create([tmp_path], "one").close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    found = find_run_parts([tmp_path])
    assert found.parts == ()
    assert "belongs to another user" in found.remarks[0]


def test_one_place_by_two_names_is_looked_at_once(tmp_path: pathlib.Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    RunDirectories.create([real], "one").close()
    assert len(find_run_parts([real, tmp_path / "link", real]).parts) == 1


def test_a_vanished_directory_is_said_and_the_others_are_looked_at(tmp_path: pathlib.Path) -> None:
    RunDirectories.create([tmp_path], "one").close()
    found = find_run_parts([tmp_path, tmp_path / "gone"])
    assert len(found.parts) == 1
    assert "gone cannot be read: No such file or directory" in found.remarks[0]


@pytest.mark.parametrize("name", ["gone", "file"])
def test_no_directory_that_can_be_read_is_an_error(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="an SSD directory cannot be read"):
        find_run_parts([tmp_path / name])


def test_a_run_that_cannot_be_looked_into_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectories.create([tmp_path], "closed").close()
    RunDirectories.create([tmp_path], "open").close()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("lohan-closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = find_run_parts([tmp_path])
    assert [part.run_id for part in found.parts] == ["open"]
    assert "it cannot be read (Permission denied)" in found.remarks[0]
