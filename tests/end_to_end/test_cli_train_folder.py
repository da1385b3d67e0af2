"""The output folder of `lohan train`: whose it is, and what a refused run leaves there."""

import fcntl
import os
import pathlib
from typing import Any

import pytest

from lohan.errors import DoesNotFit
from support import tiny_chat
from support.small_training import make_place, train


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    return make_place(tmp_path, monkeypatch)


def test_a_run_that_is_refused_early_leaves_no_folder(place: pathlib.Path) -> None:
    (place / "rows.jsonl").write_text("")
    assert train(place).exit_code == 2
    assert not (place / "out").exists()
    (place / "out").mkdir()
    assert train(place).exit_code == 2
    assert (place / "out").is_dir()


def test_leftovers_go_and_links_with_the_names_of_our_files_are_not_followed(
    place: pathlib.Path,
) -> None:
    (place / "treasure").write_text("mine")
    (place / "out").mkdir()
    for name in (".lohan-probe", ".lohan-reserved"):
        (place / "out" / name).symlink_to(place / "treasure")
    left = place / "out" / ".out.partial-0badcafe"
    left.mkdir()  # by a process that was killed while it wrote its model
    assert train(place).exit_code == 0
    assert not left.exists()
    assert (place / "treasure").read_text() == "mine"


def _everything_in(place: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.relative_to(place) for path in place.rglob("*"))


@pytest.mark.parametrize("is_made_before", [False, True])
def test_a_run_the_engine_refuses_leaves_what_was_there_before(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_made_before: bool
) -> None:
    out = place / "new" / "out"
    if is_made_before:
        out.mkdir(parents=True)
        (out / "notes.txt").write_text("mine")
    before = _everything_in(place)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DoesNotFit("1 GiB of RAM is needed", why="that is much", remedy="give more RAM")

    with monkeypatch.context() as patch:
        patch.setattr("lohan.train.trainer.saving.attach_with", refuse)
        done = train(place, out=str(out), eval_data=str(place / "rows.jsonl"))
    assert done.exit_code == 2
    assert "give more RAM" in done.stderr
    assert _everything_in(place) == before
    assert train(place, out=str(out)).exit_code == 0


def test_a_resume_that_is_refused_leaves_the_configuration_of_the_run(place: pathlib.Path) -> None:
    assert train(place).exit_code == 0
    before = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
    rows = tiny_chat.write_jsonl(place / "other.jsonl", tiny_chat.conversations(12, seed=5))
    for changes in ({"learning_rate": "9e-3"}, {"data": str(rows)}):
        assert train(place, "--resume", **changes).exit_code == 2
        after = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
        assert after == before


def test_room_for_archives_of_all_epochs_is_asked_for_before_states_are_written(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 65_000_000})  # enough for the model alone
    monkeypatch.setattr("lohan.train.run.disk_reservation.shutil.disk_usage", lambda path: usage)
    done = train(
        place, "--offload.archive_steps", "1", max_steps="-1", num_train_epochs="2",
        save_total_limit="9",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "archive" in done.stderr
    assert list((place / "ssd").iterdir()) == []
    assert not (place / "out").exists()


def test_a_second_process_in_the_same_folder_is_refused(place: pathlib.Path) -> None:
    (place / "out").mkdir()
    descriptor = os.open(place / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        done = train(place)
    finally:
        os.close(descriptor)
    assert done.exit_code == 2
    assert "another process is training into" in done.stderr
    assert os.listdir(place / "out") == []
    assert train(place).exit_code == 0


def test_an_output_folder_without_room_is_refused_before_weights_are_taken_in(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("lohan.train.run.disk_reservation.shutil.disk_usage", lambda path: usage)
    done = train(place)
    assert done.exit_code == 2
    assert "64.1 MB" in done.stderr
    assert list((place / "ssd").iterdir()) == []


def test_a_folder_that_holds_a_model_is_not_written_to(place: pathlib.Path) -> None:
    before = sorted((place / "model").iterdir())
    done = train(place, out=str(place / "model"))
    assert done.exit_code == 2
    assert "already holds a model" in done.stderr
    assert sorted((place / "model").iterdir()) == before
