"""Runs left on SSDs: joined over their directories, removed whole or not at all."""

import os
import pathlib
import shutil

import pytest

from lohan.errors import ConfigError, StorageError
from lohan.ssd import RunDirectories
from lohan.store import LeftRun, list_left_runs, refuse_removal, remove_left_run
from support.left_runs import held_elsewhere, leave_run
from support.ssd_engines import nothing_leaks
from support.state_stores import make_directories


def only(*parents: pathlib.Path) -> LeftRun:
    (run,) = list_left_runs(parents).runs
    return run


def names_in(*parents: pathlib.Path) -> list[str]:
    return sorted(path.name for parent in parents for path in parent.rglob("*"))


def test_a_sealed_run_shows_model_step_and_size(tmp_path: pathlib.Path) -> None:
    directories = make_directories(tmp_path, 2)
    leave_run(directories, "one", step=12, metadata={"model": "SmolLM2"})
    run = only(*directories)
    assert (run.run_id, run.model, run.step, run.missing) == ("one", "SmolLM2", 12, ())
    assert run.disk_bytes > 100_000
    assert run.holder is None
    assert run.foreign_files == ()


def test_a_sealed_run_is_removed_without_a_trace(tmp_path: pathlib.Path) -> None:
    directories = make_directories(tmp_path, 2)
    leave_run(directories, "one")
    leave_run(directories, "two")
    with nothing_leaks():
        run = next(run for run in list_left_runs(directories).runs if run.run_id == "one")
        done = remove_left_run(run)
    assert done.removed_bytes > 100_000
    assert done.left == ()
    assert [run.run_id for run in list_left_runs(directories).runs] == ["two"]


def test_a_run_that_was_never_sealed_is_listed_and_removed(tmp_path: pathlib.Path) -> None:
    directories = make_directories(tmp_path, 2)
    leave_run(directories, "one", step=None)
    run = only(*directories)
    assert (run.step, run.model, len(run.parts)) == (None, None, 2)
    remove_left_run(run)
    assert names_in(*directories) == []


def test_what_a_measurement_left_is_known_as_such(tmp_path: pathlib.Path) -> None:
    directories = make_directories(tmp_path, 2)
    RunDirectories.create(directories, "measure-0123456789ab").close()
    for directory in directories:
        (directory / "lohan-measure-0123456789ab" / "probe").write_bytes(b"x" * 5000)
    run = only(*directories)
    assert run.is_measurement
    assert run.disk_bytes >= 10_000
    remove_left_run(run)
    assert names_in(*directories) == []


def test_a_held_run_is_never_removed(tmp_path: pathlib.Path) -> None:
    directories = make_directories(tmp_path, 2)
    leave_run(directories, "one")
    free = only(*directories)
    before = names_in(*directories)
    with held_elsewhere("one", *directories) as process:
        with pytest.raises(StorageError, match=f"run one is held by process {process}"):
            remove_left_run(only(*directories))
        # Also if it was free when it was listed.
        with pytest.raises(StorageError, match="run one is held by"):
            remove_left_run(free)
    assert names_in(*directories) == before
    remove_left_run(only(*directories))


def test_foreign_files_stay_and_keep_their_directory(tmp_path: pathlib.Path) -> None:
    (directory,) = make_directories(tmp_path, 1)
    leave_run([directory], "one")
    own = directory / "lohan-one"
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (own / "notes.txt").write_text("mine")
    (own / "model.0.bin").write_text("mine")
    (own / "probe").write_text("mine")
    (own / "states.9.bin").symlink_to(precious)
    (own / "activations.0.bin").mkdir()
    (own / "activations.0.bin" / "deep").write_text("mine too")
    run = only(directory)
    assert [os.path.basename(path) for path in run.foreign_files] == [
        "activations.0.bin",
        "model.0.bin",
        "notes.txt",
        "probe",
        "states.9.bin",
    ]
    # The link does not count as a second drive's share either.
    done = remove_left_run(run)
    assert done.left == (str(own),)
    assert names_in(directory) == [
        "activations.0.bin", "deep", "lohan-one", "model.0.bin", "notes.txt", "probe",
        "states.9.bin",
    ]  # fmt: skip
    assert precious.read_text() == "keep"


def test_a_run_is_removed_only_with_all_its_directories(tmp_path: pathlib.Path) -> None:
    first, second = make_directories(tmp_path, 2)
    leave_run([first, second], "one")
    run = only(first)
    assert run.missing == (str(second / "lohan-one"),)
    before = names_in(first, second)
    with pytest.raises(ConfigError, match="lies on 2 SSD directories, 1 of them are given") as seen:
        remove_left_run(run)
    assert str(second / "lohan-one") in seen.value.why
    assert names_in(first, second) == before
    remove_left_run(run, is_incomplete_fine=True)
    assert names_in(first) == []
    assert (second / "lohan-one" / "manifest.json").exists()


def test_a_vanished_second_directory_is_not_taken_for_granted(tmp_path: pathlib.Path) -> None:
    first, second = make_directories(tmp_path, 2)
    leave_run([first, second], "one")
    shutil.rmtree(second)
    found = list_left_runs([first, second])
    assert "cannot be read" in found.remarks[0]
    with pytest.raises(ConfigError, match="1 of them are given"):
        refuse_removal(found.runs[0])
    refuse_removal(found.runs[0], is_incomplete_fine=True)


def test_a_missing_share_of_a_run_without_a_seal_is_noticed(tmp_path: pathlib.Path) -> None:
    first, second = make_directories(tmp_path, 2)
    leave_run([first, second], "one", step=None)
    assert only(second).missing == ("a directory that no seal names",)


def test_a_copy_of_the_manifest_that_is_lost_or_damaged_does_not_split_a_run(
    tmp_path: pathlib.Path,
) -> None:
    first, second = make_directories(tmp_path, 2)
    leave_run([first, second], "one")
    manifest = second / "lohan-one" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-9])
    run = only(first, second)
    assert (len(run.parts), run.step) == (2, 7)
    assert "is damaged" in run.remarks[0]
    manifest.unlink()
    assert len(only(first, second).parts) == 2


def test_directories_that_moved_still_belong_together(tmp_path: pathlib.Path) -> None:
    first, second = make_directories(tmp_path, 2)
    leave_run([first, second], "one")
    (second / "lohan-one" / "manifest.json").unlink()
    moved = tmp_path / "moved"
    second.rename(moved)
    run = only(first, moved)
    assert (len(run.parts), run.missing) == (2, ())


def test_two_runs_of_one_name_are_two_runs(tmp_path: pathlib.Path) -> None:
    first, second = make_directories(tmp_path, 2)
    leave_run([first], "one", step=3)
    leave_run([second], "one", step=4)
    runs = list_left_runs([first, second]).runs
    assert sorted(run.step or 0 for run in runs) == [3, 4]
    remove_left_run(runs[0])
    assert len(list_left_runs([first, second]).runs) == 1


def test_a_manifest_of_another_run_or_format_is_not_touched(tmp_path: pathlib.Path) -> None:
    first, second = make_directories(tmp_path, 2)
    leave_run([first], "one")
    leave_run([second], "two")
    foreign = (second / "lohan-two" / "manifest.json").read_bytes()
    (first / "lohan-one" / "manifest.json").write_bytes(foreign)
    run = only(first)
    with pytest.raises(ConfigError, match="run one is not removed"):
        remove_left_run(run)
    assert (first / "lohan-one" / "manifest.json").read_bytes() == foreign


def test_a_file_that_cannot_be_deleted_is_named_and_its_seal_is_gone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = make_directories(tmp_path, 2)
    leave_run(directories, "one")
    run = only(*directories)
    unlink = os.unlink

    def refuse(path: str) -> None:
        if str(path).endswith("states.1.bin"):
            raise PermissionError(13, "Permission denied", path)
        unlink(path)

    with monkeypatch.context() as patch, nothing_leaks():
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(StorageError, match="a run could not be removed") as seen:
            remove_left_run(run)
    assert str(seen.value.path).endswith("states.1.bin")
    # What is left is still known as a run, can be seen, and can be removed.
    again = only(*directories)
    assert (again.step, len(again.parts)) == (None, 2)
    remove_left_run(again)
    assert names_in(*directories) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_directory_without_permission_is_said(tmp_path: pathlib.Path) -> None:
    (directory,) = make_directories(tmp_path, 1)
    leave_run([directory], "one")
    (directory / "lohan-one").chmod(0)
    try:
        found = list_left_runs([directory])
        assert found.runs == ()
        assert "it cannot be read" in found.remarks[0]
    finally:
        (directory / "lohan-one").chmod(0o700)


def test_an_interrupted_removal_can_be_finished(tmp_path: pathlib.Path) -> None:
    (directory,) = make_directories(tmp_path, 1)
    (directory / "lohan-one").mkdir(mode=0o700)
    remove_left_run(only(directory))
    assert names_in(directory) == []
