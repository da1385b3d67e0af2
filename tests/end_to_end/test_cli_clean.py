"""`lohan clean`: lists what runs left, deletes only what was named and confirmed."""

import os
import pathlib
import time

import pytest
from typer.testing import CliRunner

from lohan.cli import app
from lohan.train.run.out_folder import locked_folder
from lohan.train.run.resume_point import RunRecord
from support.command_line import run_lohan
from support.left_runs import held_elsewhere, leave_run
from support.state_stores import make_directories


@pytest.fixture
def ssds(tmp_path: pathlib.Path) -> list[pathlib.Path]:
    return make_directories(tmp_path, 2)


def words(ssds: list[pathlib.Path], *more: str) -> list[str]:
    return ["clean", *(word for ssd in ssds for word in ("--ssd", str(ssd))), *more]


def test_runs_are_listed_and_nothing_is_touched(ssds: list[pathlib.Path]) -> None:
    leave_run(ssds, "first", step=41, metadata={"user": {"model": "/m/SmolLM2-135M", "out": "/o"}})
    leave_run(ssds[:1], "second", step=None)
    long_ago = time.time() - 3 * 86400
    for path in [*ssds[0].glob("lohan-first/*"), *ssds[1].glob("lohan-first/*")]:
        os.utime(path, (long_ago, long_ago))
        os.utime(path.parent, (long_ago, long_ago))
    ran = run_lohan(*words(ssds))
    assert ran.exit_code == 0
    for expected in ("first", "SmolLM2-135M", "41", "second", "none", "3d 00h ago", "--remove RUN"):
        assert expected in ran.stdout
    fields = run_lohan(*words(ssds, "--json")).fields
    assert [run["run_id"] for run in fields["runs"]] == ["first", "second"]
    assert fields["runs"][0]["step"] == 41
    assert fields["runs"][0]["model"] == "/m/SmolLM2-135M"
    assert fields["runs"][0]["out"] == "/o"


def test_an_empty_directory_has_no_runs(ssds: list[pathlib.Path]) -> None:
    ran = run_lohan(*words(ssds))
    assert (ran.exit_code, ran.stdout) == (0, "No runs are left there.\n")


def test_a_run_is_deleted_after_yes_and_not_after_anything_else(
    ssds: list[pathlib.Path],
) -> None:
    leave_run(ssds, "first")
    for answer in ("n\n", "\n", "", "nonsense\nno\n"):
        done = CliRunner().invoke(app, words(ssds, "--remove", "first"), input=answer)
        assert done.exit_code == 1
        assert "stays as it is" in done.stdout
    assert (ssds[0] / "lohan-first" / "manifest.json").exists()
    done = CliRunner().invoke(app, words(ssds, "--remove", "first"), input="y\n")
    assert done.exit_code == 0
    assert str(ssds[1] / "lohan-first") in done.stdout
    assert "freed" in done.stdout
    assert [list(ssd.iterdir()) for ssd in ssds] == [[], []]


def test_yes_needs_no_question(ssds: list[pathlib.Path]) -> None:
    leave_run(ssds, "first")
    leave_run(ssds, "second")
    ran = run_lohan(*words(ssds, "--remove", "first", "--remove", "second", "--yes", "--json"))
    assert [run["run_id"] for run in ran.fields["removed"]] == ["first", "second"]
    assert [list(ssd.iterdir()) for ssd in ssds] == [[], []]


def test_json_does_not_ask(ssds: list[pathlib.Path]) -> None:
    leave_run(ssds, "first")
    ran = run_lohan(*words(ssds, "--remove", "first", "--json"))
    assert ran.exit_code == 2
    assert "add --yes" in ran.stderr


def test_a_run_in_use_is_shown_and_refused(ssds: list[pathlib.Path]) -> None:
    leave_run(ssds, "first")
    leave_run(ssds, "second")
    with held_elsewhere("first", *ssds) as process:
        assert f"in use by process {process}" in run_lohan(*words(ssds)).stdout.replace("\n", " ")
        # Nothing is removed if one of several cannot be.
        ran = run_lohan(*words(ssds, "--remove", "second", "--remove", "first", "--yes"))
    assert ran.exit_code == 2
    assert f"held by process {process}" in ran.stderr
    assert (ssds[0] / "lohan-second").exists()


def test_a_part_of_a_run_is_refused_until_it_is_said_to_be_all(ssds: list[pathlib.Path]) -> None:
    leave_run(ssds, "first")
    listed = run_lohan(*words(ssds[:1])).stdout
    assert "not given" in listed
    ran = run_lohan(*words(ssds[:1], "--remove", "first", "--yes"))
    assert ran.exit_code == 2
    assert "--incomplete" in ran.stderr
    ran = run_lohan(*words(ssds[:1], "--remove", "first", "--yes", "--incomplete"))
    assert ran.exit_code == 0
    assert f"left of this run: {ssds[1] / 'lohan-first'}" in ran.stdout
    assert (ssds[1] / "lohan-first").exists()


def test_an_unknown_run_is_named_with_the_nearest(ssds: list[pathlib.Path]) -> None:
    leave_run(ssds, "first")
    ran = run_lohan(*words(ssds, "--remove", "firsst", "--yes"))
    assert ran.exit_code == 2
    assert 'write "first"' in ran.stderr
    assert (ssds[0] / "lohan-first").exists()
    ran = run_lohan(*words(ssds, "--remove", "../ssd0", "--yes"))
    assert ran.exit_code == 2


def test_two_runs_of_one_name_have_to_be_told_apart(ssds: list[pathlib.Path]) -> None:
    for ssd in ssds:
        leave_run([ssd], "same")
    ran = run_lohan(*words(ssds, "--remove", "same", "--yes"))
    assert ran.exit_code == 2
    assert "there are 2 runs named 'same'" in ran.stderr
    assert run_lohan(*words(ssds[:1], "--remove", "same", "--yes")).exit_code == 0
    assert (ssds[1] / "lohan-same").exists()


def test_foreign_files_are_named_and_stay(ssds: list[pathlib.Path]) -> None:
    leave_run(ssds[:1], "first")
    (ssds[0] / "lohan-first" / "notes").write_text("mine")
    (ssds[0] / "lohan-other").symlink_to(ssds[1])
    listed = run_lohan(*words(ssds[:1])).stdout
    assert "notes was not made by a run and would stay" in listed
    assert "lohan-other is left alone: it is a symbolic link" in listed
    ran = run_lohan(*words(ssds[:1], "--remove", "first", "--yes"))
    assert "lohan-first stays: other files are in it" in ran.stdout
    assert [path.name for path in (ssds[0] / "lohan-first").iterdir()] == ["notes"]


def test_a_directory_that_is_gone_is_an_error_alone_and_a_note_beside_others(
    ssds: list[pathlib.Path],
) -> None:
    gone = ssds[0].parent / "gone"
    ran = run_lohan(*words([gone]))
    assert ran.exit_code == 2
    assert "an SSD directory cannot be read" in ran.stderr
    ran = run_lohan(*words([*ssds, gone]))
    assert ran.exit_code == 0
    assert "gone cannot be read" in ran.stdout


def test_without_a_directory_it_says_what_is_missing() -> None:
    ran = run_lohan("clean")
    assert ran.exit_code == 2
    assert "--ssd" in ran.stderr


def test_what_a_killed_process_left_in_the_output_folder_goes_with_the_run(
    ssds: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    folders = {name: tmp_path / name for name in ("out", "others")}
    for name, out in folders.items():
        (out / f".{name}.partial-0badcafe").mkdir(parents=True)
        (out / ".lohan-reserved").write_bytes(b"")
        (out / "notes.txt").write_text("mine")
        leave_run(ssds, f"run-{name}", metadata={"user": {"out": str(out)}})
    RunRecord(run_id="run-out", ssd=()).write(folders["out"])
    RunRecord(run_id="a-later-one", ssd=()).write(folders["others"])
    for name in folders:
        assert run_lohan(*words(ssds, "--remove", f"run-{name}", "--yes")).exit_code == 0
    assert {path.name for path in folders["out"].iterdir()} == {"_lohan", "notes.txt"}
    assert len(list(folders["others"].iterdir())) == 4
    leave_run(ssds, "run-out", metadata={"user": {"out": str(folders["out"])}})
    with locked_folder(folders["out"]):
        ran = run_lohan(*words(ssds, "--remove", "run-out", "--yes"))
    assert ran.exit_code == 0
    assert "another process is training into" in ran.stdout
