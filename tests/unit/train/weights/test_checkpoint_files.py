"""Which files are the weights, where a model is looked for, and what is said if it is not."""

import json
import os
import pathlib
import pickle
from typing import Any

import pytest

from lohan.errors import CheckpointError, ConfigError, Corrupt, HardwareError, ShortTransfer
from lohan.train.weights.checkpoint_files import INDEX_NAME, find_stored_tensors
from lohan.train.weights.model_places import find_place
from lohan.train.weights.source import open_source
from support.model_directories import save_model, stored_tensors


@pytest.fixture
def sharded(tmp_path: pathlib.Path) -> pathlib.Path:
    save_model("llama", tmp_path / "model", max_shard="4KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    return tmp_path / "model"


def test_a_missing_shard_is_named(sharded: pathlib.Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"1 of {len(shards)} .*{shards[1].name}"):
        open_source(sharded)


def test_a_truncated_shard_is_named_with_its_tensor(sharded: pathlib.Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(ShortTransfer, match=rf"ends within the tensor .*{shard.name}"):
        open_source(sharded)


def test_a_shard_with_a_damaged_header_is_named(sharded: pathlib.Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[9] ^= 0xFF
    shard.write_bytes(content)
    with pytest.raises(Corrupt, match=shard.name):
        open_source(sharded)


def test_an_index_of_another_model_is_noticed(sharded: pathlib.Path) -> None:
    fields = json.loads((sharded / INDEX_NAME).read_text())
    name, file = next(iter(fields["weight_map"].items()))
    del fields["weight_map"][name]
    fields["weight_map"]["model.other.weight"] = file
    (sharded / INDEX_NAME).write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=r"1 tensors are not in the files.*model\.other"):
        open_source(sharded)


def test_tensors_the_index_does_not_name_are_left_out(sharded: pathlib.Path) -> None:
    fields = json.loads((sharded / INDEX_NAME).read_text())
    del fields["weight_map"]["model.norm.weight"]
    (sharded / INDEX_NAME).write_text(json.dumps(fields))
    assert "model.norm.weight" not in find_stored_tensors(sharded)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "../other/model.safetensors"}}',
    ],
)
def test_what_is_no_index_is_refused(text: str, sharded: pathlib.Path) -> None:
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="is not an index"):
        find_stored_tensors(sharded)


def test_shards_without_an_index_are_refused(sharded: pathlib.Path) -> None:
    (sharded / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"no {INDEX_NAME}"):
        find_stored_tensors(sharded)


def test_a_single_file_of_another_name_is_taken(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert find_stored_tensors(tmp_path).keys() == stored_tensors(tmp_path).keys()


def test_a_pickle_is_refused_and_never_opened(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap(str(tmp_path / "sprung"))))
    with pytest.raises(ConfigError, match=r"pickles only \(pytorch_model\.bin\)") as caught:
        open_source(tmp_path)
    assert "save_pretrained" in caught.value.remedy
    assert not (tmp_path / "sprung").exists()


class _Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_directory_without_weights_says_what_it_holds(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"holds no weights.*config\.json"):
        open_source(tmp_path)


def test_a_directory_without_a_configuration_is_refused(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        open_source(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", '{"model_type": "nobody"}'])
def test_a_configuration_that_means_nothing_is_refused(text: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="the configuration in"):
        open_source(tmp_path)


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./none", "~/none/none", "a/b/c", "a//b"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match="there is no model at"):
        open_source(model)


def test_an_empty_name_is_not_the_current_directory() -> None:
    with pytest.raises(ConfigError, match="no model is given"):
        open_source("")


def test_a_file_that_is_no_model_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match="is a file, and not a GGUF file"):
        open_source(tmp_path / "model.safetensors")


def test_several_gguf_files_are_refused(tmp_path: pathlib.Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_text("")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\)"):
        open_source(tmp_path)


def test_a_damaged_gguf_file_is_an_error_of_ours(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match="the configuration in"):
        open_source(tmp_path / "a.gguf")


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: Any, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("cannot find the requested files in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(HardwareError, match="the hub cannot be reached") as caught:
        open_source("owner/name")
    assert "give its directory" in caught.value.remedy


def test_an_unknown_hub_id_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unknown(*args: Any, **kwargs: Any) -> str:
        raise ValueError("404")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unknown)
    with pytest.raises(ConfigError, match="owner/name cannot be had from the hub"):
        open_source("owner/name")


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_download_asks_for_no_pickles_and_code_only_if_trusted(
    is_trusted: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    save_model("llama", tmp_path)
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    place = find_place("owner/name", revision="v1", trust_remote_code=is_trusted)
    assert place.directory == tmp_path
    assert (asked["name"], asked["revision"]) == ("owner/name", "v1")
    assert ("*.py" in asked["allow_patterns"]) is is_trusted
    for name in ("pytorch_model.bin", "consolidated.safetensors", "x.gguf", "optimizer.pt"):
        assert not any(pathlib.Path(name).match(one) for one in asked["allow_patterns"])
