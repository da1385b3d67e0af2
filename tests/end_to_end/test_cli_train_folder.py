"""The output folder of `lohan train`: whose it is, and what a refused run leaves there."""

import errno
import fcntl
import os
import pathlib
import shlex
import signal
import sys
import types
from typing import Any

import pytest

from lohan.errors import DoesNotFit, StorageError
from lohan.ssd.runs.partial_directory import partial_directory
from lohan.train.fine_tune import _what_stays
from lohan.train.run.out_folder import held_folder
from lohan.train.trainer.saving import SavingMixin
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
    for name in (".out.lohan-write-probe", ".lohan-reserved"):
        (place / "out" / name).symlink_to(place / "treasure")
    left = place / "out" / ".out.partial-0badcafe"
    left.mkdir()  # by a process that was killed while it wrote its model
    assert train(place).exit_code == 0
    assert not left.exists()
    assert (place / "treasure").read_text() == "mine"


def test_a_name_too_long_to_write_the_model_beside_it_is_refused_first(
    tmp_path: pathlib.Path,
) -> None:
    for num_letters in (230, 250):
        out = tmp_path / ("o" * num_letters)
        said = ""
        try:
            with held_folder(out, is_resuming=False), partial_directory(out, is_merge=True):
                pass
        except StorageError as error:
            said = error.what
        assert ("the output folder cannot be written" in said) == (num_letters == 250)
    assert not out.exists()


def test_the_command_to_go_on_with_can_be_pasted() -> None:
    stopped = types.SimpleNamespace(
        stop_request=types.SimpleNamespace(is_set=True),
        sealed_step=3,
        state=types.SimpleNamespace(global_step=3),
    )
    said = _what_stays(stopped, pathlib.Path("/my runs/it's"), SystemExit(143))
    command = said.partition("continue with ")[2]
    assert shlex.split(command) == ["lohan", "train", "/my runs/it's", "--resume"]


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


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_signal_while_the_first_states_are_written_leaves_nothing(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, exit_code: int
) -> None:
    taken = []

    def attach(model: Any, optimizer: Any, options: Any, first: Any) -> None:
        for name, _ in first.weights:
            taken.append(name)
            os.kill(os.getpid(), number)

    monkeypatch.setattr("lohan.train.trainer.saving.attach_with", attach)
    done = train(place)
    assert (done.exit_code, len(taken)) == (exit_code, 1)
    assert "stopped before training began" in done.stdout
    assert not (place / "out").exists()


def test_what_a_run_says_cannot_stop_it(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        print("before")
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys.stdout, "_stream", full)
            print("during", flush=True)
        monkeypatch.undo()

    monkeypatch.setattr("lohan.train.fine_tune.run_training", run)
    done = train(place)
    assert (done.exit_code, done.stdout) == (0, "before\n")
    assert "No space left on device" in done.stderr


def test_closing_lets_go_of_the_engine_although_the_folder_cannot_be_written() -> None:
    closed = []

    def refuse() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    trainer: Any = types.SimpleNamespace(
        _release_space=refuse,
        _engine=types.SimpleNamespace(close=lambda: closed.append("engine")),
    )
    with pytest.raises(OSError, match="Read-only"):
        SavingMixin.close(trainer)
    assert closed == ["engine"]


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
