"""When states cannot be resumed: which copy is offered, and when none is."""

import errno
import pathlib

import pytest
import torch

from lohan.durable_files import write_json
from lohan.errors import CheckpointError, ConfigError, Corrupt, LohanError
from lohan.ssd.engines.storage_errors import short_transfer, storage_error
from lohan.train.run.resume_point import (
    RESUME_NAME,
    TRAINER_NAME,
    VERSION,
    intact_archive,
    with_offer,
    write_files_list,
)
from lohan.train.weights.archive import write_states
from support.command_line import run_lohan
from support.model_directories import save_model

DAMAGED = Corrupt("states changed", why="a drive did it", remedy="check the drive", path="states.0")


class OneTensor:
    def __init__(self) -> None:
        self.counters = {"num_steps": 1}
        self.buffers: dict[str, object] = {}

    def weights(self, *, are_frozen_wanted: bool) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.ones(8))]

    def moments(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        return [("w", torch.zeros(8), torch.zeros(8))]


def archive_in(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_states(OneTensor(), {"w": (8,)}, folder / "states")
    write_json(folder / RESUME_NAME, {"version": VERSION})
    write_json(folder / TRAINER_NAME, {})
    write_files_list(folder)
    return folder


def damage(folder: pathlib.Path) -> None:
    path = folder / "states" / "V32-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def test_the_newest_intact_copy_is_offered_with_the_option_that_takes_it(
    tmp_path: pathlib.Path,
) -> None:
    for step in (2, 10, 4):
        archive_in(tmp_path / f"checkpoint-{step}")
    damage(tmp_path / "checkpoint-10")
    said = with_offer(DAMAGED, tmp_path, "r1")
    assert said.remedy.endswith(f"--resume-from {tmp_path / 'checkpoint-4'}")
    assert "states changed" in said.what
    assert "checkpoint-10 is damaged too" in said.what


def test_a_copy_without_its_resume_file_is_not_whole(tmp_path: pathlib.Path) -> None:
    (archive_in(tmp_path / "checkpoint-2") / RESUME_NAME).write_text("{")
    found, damaged = intact_archive(tmp_path)
    assert found is None
    assert [path.name for path, _ in damaged] == ["checkpoint-2"]
    said = with_offer(DAMAGED, tmp_path, "r1")
    assert said.remedy == "check the drive"
    assert "checkpoint-2 is damaged too" in said.what


@pytest.mark.parametrize(
    "error",
    [
        DAMAGED,
        CheckpointError("no manifest", why="it is gone", remedy="restore it"),
        storage_error("a run directory is missing", errno.ENOENT, path="gone"),
        storage_error("a read failed", errno.EIO, path="states.0"),
        short_transfer("a read", path="p", offset_bytes=0, asked_bytes=2, got_bytes=1),
    ],
)
def test_a_copy_is_offered_for_whatever_is_lost(error: LohanError, tmp_path: pathlib.Path) -> None:
    archive_in(tmp_path / "checkpoint-2")
    assert "checkpoint-2" in with_offer(error, tmp_path, "r1").remedy


@pytest.mark.parametrize(
    "error",
    [
        storage_error("run r1 is held by process 7", errno.EWOULDBLOCK, path="lock"),
        storage_error("states cannot be opened", errno.EACCES, path="states.0"),
        ConfigError("other settings", why="they differ", remedy="put them back"),
    ],
)
def test_none_is_offered_for_what_goes_away(error: LohanError, tmp_path: pathlib.Path) -> None:
    archive_in(tmp_path / "checkpoint-2")
    assert with_offer(error, tmp_path, "r1") is error


def test_check_finds_damage_in_the_states_of_an_archive(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path, is_with_tokenizer=True)
    archive_in(tmp_path / "checkpoint-2")
    (whole,) = run_lohan("check", tmp_path, "--json").fields["checked"]
    assert whole["problems"] == []
    assert whole["what"] == "model with 1 copies of states"
    damage(tmp_path / "checkpoint-2")
    ran = run_lohan("check", tmp_path)
    assert ran.exit_code == 1
    assert "V32-00001" in ran.stdout
