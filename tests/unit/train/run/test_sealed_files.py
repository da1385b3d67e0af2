"""Every file a resume reads is the one that was sealed: one changed bit is refused."""

import json
import os
import pathlib
import random
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from lohan.errors import CheckpointError, Corrupt, LohanError
from lohan.train.run import resume_point
from lohan.train.run.resume_point import LIST_HASH, STATES_FOLDER, read_resume
from lohan.train.weights import archive
from support import tiny_chat
from support.command_line import run_lohan
from support.small_training import make_place, train

ARCHIVING = {"offload.archive_steps": "2", "save_steps": "2", "max_steps": "3"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A finished run with an archive; nobody changes it."""
    with pytest.MonkeyPatch.context() as patch:
        place = make_place(tmp_path_factory.mktemp("made"), patch)
        done = train(place, **ARCHIVING)
        assert done.exit_code == 0, done.stderr
        yield place


@pytest.fixture
def place(
    made: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    """A copy of it to change."""
    make_place(tmp_path / "unused", monkeypatch)
    shutil.copytree(made, tmp_path / "place")
    return tmp_path / "place"


def seal_of(place: pathlib.Path) -> dict[str, Any]:
    (path,) = place.glob("ssd/lohan-*/seal.json")
    found = json.loads(path.read_text())["metadata"]
    assert isinstance(found, dict)
    return found


def read_all(checkpoint: pathlib.Path, seal: dict[str, Any] | None) -> Any:
    """Everything a resume takes from a checkpoint folder."""
    found = [read_resume(checkpoint, seal)]
    found.append((checkpoint / "trainer_state.json").read_bytes())
    if resume_point.has_archive(checkpoint):
        copied = archive.read_copy(checkpoint / STATES_FOLDER)
        found += [copied.counters, copied.buffers]
    return found


def read_or_refuse(checkpoint: pathlib.Path, seal: dict[str, Any] | None) -> Any:
    try:
        return read_all(checkpoint, seal)
    except LohanError as error:
        return error


def flips(content: bytes, count: int) -> list[tuple[int, int]]:
    """Places to change: the two ends and some in between, each with a bit."""
    draw = random.Random(7)
    inside = draw.sample(range(len(content)), min(count, len(content)))
    return [(position, draw.randrange(8)) for position in {0, len(content) - 1, *inside}]


def assert_flips_are_refused(
    checkpoint: pathlib.Path, seal: dict[str, Any] | None, *, num_flips: int
) -> None:
    whole = read_all(checkpoint, seal)
    small = [path for path in checkpoint.rglob("*.json") if path.name in READ_BY_A_RESUME]
    assert {path.name for path in small} >= {"files.json", "resume.json", "trainer_state.json"}
    for path in small:
        content = path.read_bytes()
        for position, bit in flips(content, num_flips):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            found = read_or_refuse(checkpoint, seal)
            if isinstance(found, LohanError):
                assert found.why
                assert found.remedy
            else:
                # A space between the fields of a list that no seal names: it reads the same.
                assert (path.name, seal) == ("files.json", None), (path, position, bit)
                assert found == whole
        path.write_bytes(content)
    assert read_all(checkpoint, seal) == whole


READ_BY_A_RESUME = ("files.json", "resume.json", "trainer_state.json", "index.json", "buffers.json")


@pytest.mark.parametrize("name", ["checkpoint-2", "checkpoint-3"])
def test_one_changed_bit_in_what_a_resume_reads_is_refused(place: pathlib.Path, name: str) -> None:
    seal = seal_of(place)
    assert seal["checkpoint"] == "checkpoint-3"
    is_sealed = name == seal["checkpoint"]
    assert_flips_are_refused(place / "out" / name, seal if is_sealed else None, num_flips=40)


@pytest.mark.long
@pytest.mark.parametrize("name", ["checkpoint-2", "checkpoint-3"])
def test_one_changed_bit_anywhere_is_refused(place: pathlib.Path, name: str) -> None:
    seal = seal_of(place) if name == "checkpoint-3" else None
    assert_flips_are_refused(place / "out" / name, seal, num_flips=1 << 30)


@pytest.mark.parametrize(
    ("field", "then", "now"),
    [
        ('"initial_lr": ', "2e-05", "2e-04"),
        ('"betas"', "0.9", "0.8"),
        ('"weight_decay": ', "0.0", "0.1"),
        ('"last_epoch": ', "3", "2"),
    ],
)
def test_a_resume_file_with_one_changed_digit_is_not_resumed(
    place: pathlib.Path, field: str, then: str, now: str
) -> None:
    path = place / "out" / "checkpoint-3" / "resume.json"
    text = path.read_text()
    begin = text.index(field)
    position = text.index(then, begin)
    path.write_text(text[:position] + now + text[position + len(then) :])
    done = train(place, "--resume", **ARCHIVING)
    assert done.exit_code == 2, done.stdout
    assert "resume.json is damaged or was changed" in done.stderr
    assert "--resume-from" in done.stderr, "the whole archive is offered"
    checked = run_lohan("check", place / "out")
    assert checked.exit_code == 1
    assert "resume.json" in checked.stdout


def test_the_counters_of_an_archive_are_covered(place: pathlib.Path) -> None:
    folder = place / "out" / "checkpoint-2"
    path = folder / STATES_FOLDER / "index.json"
    path.write_text(path.read_text().replace('"num_steps": 2', '"num_steps": 3'))
    with pytest.raises(Corrupt, match=r"index\.json is damaged"):
        read_resume(folder)
    assert "index.json" in run_lohan("check", folder).stdout
    done = train(place, "--resume-from", str(folder), out=str(place / "two"), **ARCHIVING)
    assert done.exit_code == 2
    assert "index.json" in done.stderr


@pytest.mark.parametrize("where", ["out", "out/checkpoint-2"])
def test_check_finds_one_changed_bit_in_every_file_of_a_model(
    place: pathlib.Path, where: str
) -> None:
    folder = place / where
    assert run_lohan("check", folder).exit_code == 0
    names = [path.name for path in folder.iterdir() if path.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        done = run_lohan("check", folder)
        assert done.exit_code == 1, name
        assert name in done.stdout
        path.write_bytes(content)


def test_the_list_of_another_seal_is_refused(place: pathlib.Path) -> None:
    """Whole by itself, and not the one the seal names."""
    folder = place / "out" / "checkpoint-3"
    text = (folder / "resume.json").read_text()
    (folder / "resume.json").write_text(text.replace('"lr": ', '"lr":  '))
    resume_point.write_files_list(folder)
    assert read_resume(folder)
    with pytest.raises(Corrupt, match="not the list that was sealed"):
        read_resume(folder, seal_of(place))
    (folder / "files.json").unlink()
    for seal in (None, seal_of(place)):
        with pytest.raises(CheckpointError, match=r"files\.json"):
            read_resume(folder, seal)


def make_older(place: pathlib.Path) -> None:
    """As releases before the list of files left a run: no hashes, working files in OUT itself."""
    out = place / "out"
    for folder in out.glob("checkpoint-*"):
        (folder / "files.json").unlink()
        path = folder / "resume.json"
        found = json.loads(path.read_text())
        del found["model"]
        found["version"] = 1
        found["versions"] = {key: found["versions"][key] for key in ("lohan", "transformers")}
        path.write_text(json.dumps(found))
    (path,) = place.glob("ssd/lohan-*/seal.json")
    seal = json.loads(path.read_text())
    for name in (LIST_HASH, "model_identity"):
        del seal["metadata"][name]
    path.write_text(json.dumps(seal))
    (out / "_lohan" / "model_files.json").unlink()
    for path in (out / "_lohan").iterdir():
        path.rename(out / path.name)
    (out / "_lohan").rmdir()


def test_a_run_of_an_older_release_goes_on_and_says_what_it_lacks(place: pathlib.Path) -> None:
    make_older(place)
    before = (place / "out" / "model.safetensors").read_bytes()
    done = train(place, "--resume", **ARCHIVING)
    assert done.exit_code == 0, done.stderr
    assert "of an older release, without hashes" in done.stdout
    assert (place / "out" / "model.safetensors").read_bytes() == before
    assert not (place / "out" / "_lohan").exists(), "it stays where it was"
    assert run_lohan("check", place / "out").exit_code == 0
    assert run_lohan("report", place / "out").exit_code == 0
    copied = train(
        place, "--resume-from", str(place / "out" / "checkpoint-2"), out=str(place / "two"),
        **ARCHIVING,
    )  # fmt: skip
    assert copied.exit_code == 0, copied.stderr
    assert (place / "two" / "model.safetensors").read_bytes() == before


def test_the_rows_in_a_table_that_changed_are_refused(place: pathlib.Path) -> None:
    """The tables are no part of the seal: their rows are, by the hash of what is trained on."""
    tiny_chat.write_jsonl(place / "rows.jsonl", tiny_chat.conversations(10, seed=1))
    done = train(place, "--resume", **ARCHIVING)
    assert done.exit_code == 2
    assert "training rows are not those" in done.stderr


def test_a_folder_that_was_to_be_removed_after_the_last_seal_goes_with_a_resume(
    place: pathlib.Path,
) -> None:
    out = place / "out"
    shutil.copytree(out / "checkpoint-3", out / "checkpoint-1")  # as a process killed there leaves
    (out / ".checkpoint-3.tmp").mkdir()
    done = train(place, "--resume", **ARCHIVING)
    assert done.exit_code == 0, done.stderr
    left = sorted(path.name for path in out.glob("*checkpoint-*"))
    assert left == ["checkpoint-2", "checkpoint-3"]


def test_the_log_is_flushed_with_every_seal(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, synced = os.fsync, []

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    done = train(place, out=str(place / "two"), max_steps="2", save_steps="1")
    assert done.exit_code == 0, done.stderr
    assert synced.count(str(place / "two" / "_lohan" / "log.jsonl")) == 2


def test_nothing_is_sealed_into_a_folder_that_was_put_in_place_of_the_run_s(
    place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a mount vanishes: what is written under it is hidden once it is back."""
    out, away, real = place / "two", place / "away", resume_point.publish

    def publish(temporary: pathlib.Path, at: pathlib.Path, step: int) -> pathlib.Path:
        if step == 2:
            out.rename(away)
            shutil.copytree(away, out)
        return real(temporary, at, step)

    monkeypatch.setattr(resume_point, "publish", publish)
    ended = train(place, out=str(out), max_steps="3", save_steps="1")
    assert ended.exit_code == 2
    assert "the output folder was removed or replaced" in ended.stderr
    assert "sealed at step 1" in ended.stdout
    shutil.rmtree(out)
    away.rename(out)
    monkeypatch.setattr(resume_point, "publish", real)
    assert train(place, "--resume", out=str(out), max_steps="3", save_steps="1").exit_code == 0
    expected = (place / "out" / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == expected


def test_a_removal_cut_off_half_way_is_finished_by_the_next(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in ("resume.json", "trainer_state.json"):
            (tmp_path / f"checkpoint-{step}" / name).write_text("{}")

    def cut_off(path: pathlib.Path, **more: Any) -> None:
        (path / "resume.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(resume_point.shutil, "rmtree", cut_off)
    kept = {"newest": tmp_path / "checkpoint-2", "save_total_limit": None}
    with pytest.raises(KeyboardInterrupt):
        resume_point.remove_old(tmp_path, **kept)
    monkeypatch.undo()
    resume_point.remove_old(tmp_path, **kept)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
