"""Exports that cannot be, or fail half way: a clear error, and nothing is left behind."""

import fcntl
import os
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lohan.errors import CheckpointError, ConfigError, OutOfSpace, StorageError
from lohan.train.weights import export_hf
from lohan.train.weights.check_export import check_model_directory
from lohan.train.weights.export_hf import export_model
from lohan.train.weights.source import ModelSource, open_source
from support.model_directories import (
    save_model,
)


def is_left_clean(directory: pathlib.Path) -> bool:
    return sorted(path.name for path in directory.iterdir()) == ["source"]


@pytest.fixture
def source(tmp_path: pathlib.Path) -> ModelSource:
    save_model("llama", tmp_path / "source", max_shard="6KB")
    return open_source(tmp_path / "source")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors[:-2], "2 tensors of the model were not given"),
        (lambda tensors: [*tensors, tensors[0]], "was given twice"),
        (lambda tensors: [*tensors, ("other", torch.ones(2))], "other is not one of the model's"),
        (
            lambda tensors: [(tensors[0][0], torch.ones(3)), *tensors[1:]],
            r"has the shape \[3\], the model's is",
        ),
    ],
)
def test_other_tensors_than_the_model_s_are_refused(
    change: Any, words: str, source: ModelSource, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        export_model(source, change(list(source.tensors())), tmp_path / "out")
    assert is_left_clean(tmp_path)


def test_a_tensor_that_is_nan_throughout_is_refused(
    source: ModelSource, tmp_path: pathlib.Path
) -> None:
    tensors = dict(source.tensors())
    tensors["model.norm.weight"] = torch.full((16,), torch.nan)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is NaN in all of its 16"):
        export_model(source, tensors.items(), tmp_path / "out")
    assert is_left_clean(tmp_path)


def test_a_value_beyond_fp16_is_refused(source: ModelSource, tmp_path: pathlib.Path) -> None:
    tensors = dict(source.tensors())
    tensors["model.norm.weight"] = torch.full((16,), 70000.0)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has values up to 70000"):
        export_model(source, tensors.items(), tmp_path / "out", dtype=torch.float16)
    assert is_left_clean(tmp_path)


def test_a_failing_stream_leaves_nothing(source: ModelSource, tmp_path: pathlib.Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(source.tensors())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(source, failing(), tmp_path / "out")
    assert is_left_clean(tmp_path)


def test_no_space_is_said_in_numbers_before_anything_is_written(
    source: ModelSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = types.SimpleNamespace(free=1_048_576)
    monkeypatch.setattr(export_hf.shutil, "disk_usage", lambda directory: full)
    with pytest.raises(OutOfSpace, match=r"the export needs 61\.\d MiB, 1\.0 MiB are free"):
        export_model(source, iter([]), tmp_path / "out")
    assert is_left_clean(tmp_path)


@pytest.mark.parametrize("function", ["posix_fallocate", "pwrite"])
def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    function: str, source: ModelSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = getattr(os, function), []

    def full(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, function, full)
    with pytest.raises(OutOfSpace, match="model-0000"):
        export_model(source, source.tensors(), tmp_path / "out", max_shard_bytes=3000)
    monkeypatch.undo()
    assert is_left_clean(tmp_path)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("os.fsync", "cannot be made durable"),
        ("os.rename", "an export cannot be renamed"),
        ("shutil.copyfile", "cannot be copied"),
        ("shutil.copytree", "cannot be copied"),
        ("pathlib.Path.write_text", "cannot be written"),
    ],
)
def test_a_drive_that_fails_leaves_nothing(
    function: str,
    words: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = save_model("llama", tmp_path / "source", is_with_tokenizer=True)
    (directory / "additional_chat_templates").mkdir()
    source = open_source(directory)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(function, fail)
    with pytest.raises(StorageError, match=words):
        export_model(source, source.tensors(), tmp_path / "out", max_shard_bytes=5000)
    monkeypatch.undo()
    assert is_left_clean(tmp_path)


def test_a_flush_that_fails_late_leaves_nothing(
    source: ModelSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, []

    def fail(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="an export cannot be made durable"):
        export_model(source, source.tensors(), tmp_path / "out")
    assert is_left_clean(tmp_path)


def test_a_merge_that_fails_leaves_no_model_and_all_the_rest(
    source: ModelSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    export_model(source, source.tensors(), out, should_merge=True)

    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(StorageError, match="an export cannot be moved"):
        export_model(source, source.tensors(), out, should_merge=True)
    assert not (out / "config.json").exists()
    assert (out / "mine").read_text() == "x"


def test_a_result_that_is_not_whole_is_not_put_in_place(
    source: ModelSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(directory: pathlib.Path, **options: Any) -> Any:
        os.truncate(directory / "model.safetensors", 500)
        return check_model_directory(directory, **options)

    monkeypatch.setattr(export_hf, "check_model_directory", damaged)
    with pytest.raises(CheckpointError, match=r"is not whole.*ends within"):
        export_model(source, source.tensors(), tmp_path / "out")
    assert is_left_clean(tmp_path)


def test_a_directory_with_something_in_it_is_not_touched(
    source: ModelSource, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(StorageError, match="is not empty"):
        export_model(source, source.tensors(), out)
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("out", "words"), [("file", "is no directory"), ("none/out", "there is no directory")]
)
def test_an_output_that_cannot_be_is_refused(
    out: str, words: str, source: ModelSource, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=words):
        export_model(source, source.tensors(), tmp_path / out)


def test_an_unwritable_place_is_refused(
    source: ModelSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"an export cannot be begun.*Permission denied"):
        export_model(source, source.tensors(), tmp_path / "out")


def test_a_mount_point_is_refused_before_anything_is_written(
    source: ModelSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(StorageError, match="is a mount point"):
        export_model(source, iter([]), tmp_path / "out")


def test_what_a_killed_export_left_is_removed_and_nothing_else(
    source: ModelSource, tmp_path: pathlib.Path
) -> None:
    left, used, other = (
        tmp_path / f".out.partial-{name}" for name in ("0badcafe", "0badbeef", "mine")
    )
    for folder in (left, used, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half of a model")
    lock = os.open(used, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as an export does that is still going on
    export_model(source, source.tensors(), tmp_path / "out")
    os.close(lock)
    assert not left.exists()
    assert used.is_dir()
    assert other.is_dir()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_other_types_are_refused(
    dtype: torch.dtype, source: ModelSource, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ConfigError, match="not a type to export in"):
        export_model(source, source.tensors(), tmp_path / "out", dtype=dtype)


def test_a_shard_of_no_bytes_is_refused(source: ModelSource, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="holds nothing"):
        export_model(source, source.tensors(), tmp_path / "out", max_shard_bytes=0)


def test_a_source_made_from_a_configuration_has_no_weights(
    source: ModelSource, tmp_path: pathlib.Path
) -> None:
    from lohan.train.weights.source import source_of_config

    with pytest.raises(ConfigError, match="has no weights"):
        next(source_of_config(source.config).tensors())
