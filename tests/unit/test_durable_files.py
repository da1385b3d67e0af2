"""Directories that are replaced: one whole directory is there at every instant."""

import errno
import os
import pathlib
import shutil
from typing import Any

import pytest

from lohan import durable_files
from lohan.durable_files import (
    exchange_names,
    publish_directory,
    restore_directory,
    write_text,
)
from lohan.train.run import resume_point

FILES = ("a", "b")


class Killed(BaseException):
    """The process ends here."""


def fill(folder: pathlib.Path, word: str) -> pathlib.Path:
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(word)
    return folder


def content(folder: pathlib.Path) -> set[str]:
    return {(folder / name).read_text() for name in FILES}


class KilledBefore:
    """Counts what changes names on the disk and ends the process before one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.number, self.seen = number, 0
        for module, name in (
            (os, "rename"),
            (shutil, "rmtree"),
            (durable_files, "exchange_names"),
            (durable_files, "sync_directory"),
        ):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name), name))

    def _counted(self, call: Any, name: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            if self.seen == self.number:
                if name == "rmtree" and args[0].is_dir():
                    (args[0] / FILES[0]).unlink()  # killed in the middle of it
                raise Killed
            return call(*args, **kwargs)

        return counted


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_at_any_step_leaves_the_former_or_the_next_directory_whole(
    tmp_path: pathlib.Path, can_exchange: bool
) -> None:
    for number in range(1, 100):
        place = tmp_path / str(number)
        place.mkdir()
        path, temporary = fill(place / "checkpoint-1", "old"), fill(place / ".c.tmp", "new")
        with pytest.MonkeyPatch.context() as patch:
            if not can_exchange:
                patch.setattr(durable_files, "exchange_names", lambda one, other: False)
            killed = KilledBefore(patch, number)
            try:
                publish_directory(temporary, path)
            except Killed:
                if can_exchange:
                    assert content(path) in ({"old"}, {"new"}), "there without being put back"
        restore_directory(path)
        assert content(path) in ({"old"}, {"new"})
        if killed.seen < number:
            break
    assert killed.seen < number
    assert content(path) == {"new"}
    assert os.listdir(place) == ["checkpoint-1"]


def test_a_directory_is_published_beside_what_a_kill_left(tmp_path: pathlib.Path) -> None:
    fill(tmp_path / ".checkpoint-1.old", "half")
    publish_directory(fill(tmp_path / ".c.tmp", "new"), tmp_path / "checkpoint-1")
    assert content(tmp_path / "checkpoint-1") == {"new"}
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def test_names_are_exchanged_in_one_instant_or_it_is_said(tmp_path: pathlib.Path) -> None:
    one, other = fill(tmp_path / "one", "1"), fill(tmp_path / "other", "2")
    if exchange_names(one, other):
        assert (content(one), content(other)) == ({"2"}, {"1"})
    with pytest.raises(OSError, match="No such file") as caught:
        exchange_names(one, tmp_path / "nothing")
    assert caught.value.errno == errno.ENOENT


def test_the_resume_point_is_found_under_the_name_a_kill_left_it(tmp_path: pathlib.Path) -> None:
    former = tmp_path / ".checkpoint-3.old"
    former.mkdir()
    (former / "resume.json").write_text('{"version": 1}')
    assert resume_point.read_resume(tmp_path / "checkpoint-3") == {"version": 1}


def test_what_killed_saves_left_is_removed_by_the_next_save(tmp_path: pathlib.Path) -> None:
    for name in (".checkpoint-2.tmp", ".checkpoint-3.old", "checkpoint-3", "checkpoint-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "resume.json").write_text('{"version": 1}')
    (tmp_path / ".checkpoint-2.tmp" / "states").mkdir()
    resume_point.remove_old(tmp_path, newest=tmp_path / "checkpoint-4", save_total_limit=None)
    assert os.listdir(tmp_path) == ["checkpoint-4"]


def test_a_link_with_the_name_of_a_temporary_file_is_not_followed(tmp_path: pathlib.Path) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")
    (tmp_path / ".run.json.tmp").symlink_to(treasure)
    write_text(tmp_path / "run.json", "{}")
    assert treasure.read_text() == "mine"
    assert (tmp_path / "run.json").read_text() == "{}"
