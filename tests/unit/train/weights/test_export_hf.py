"""Exporting: what comes out is what transformers loads, bit for bit, or nothing comes out."""

import json
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from lohan import _native
from lohan.errors import ConfigError
from lohan.train.weights.check_export import check_model_directory
from lohan.train.weights.export_hf import export_model
from lohan.train.weights.source import ModelSource, WeightsWarning, open_source
from support.model_directories import (
    FAMILIES,
    TEMPLATE,
    load_whole,
    logits,
    rewrite,
    save_mixtral,
    save_model,
    save_own_code,
    save_tokenizer,
    stored_tensors,
)


def masters(source: ModelSource, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The source's tensors as fp32 masters, in an order of no meaning."""
    tensors = [(name, tensor.float()) for name, tensor in source.tensors()]
    random.Random(seed).shuffle(tensors)
    yield from tensors


@pytest.fixture
def source(tmp_path: pathlib.Path) -> ModelSource:
    save_model("llama", tmp_path / "source", max_shard="6KB")
    return open_source(tmp_path / "source")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 4000])
def test_in_and_out_gives_the_same_tensors_and_logits(
    family: str, max_shard_bytes: int, tmp_path: pathlib.Path
) -> None:
    save_model(family, tmp_path / "source", max_shard="6KB", is_with_tokenizer=True)
    source = open_source(tmp_path / "source")
    report = export_model(
        source, masters(source), tmp_path / "out", max_shard_bytes=max_shard_bytes
    )
    before, after = stored_tensors(tmp_path / "source"), stored_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype is tensor.dtype
        assert torch.equal(after[name], tensor), name
    found = logits(load_whole(tmp_path / "out"), family)
    assert torch.equal(found, logits(load_whole(tmp_path / "source"), family))
    assert report == check_model_directory(tmp_path / "out", should_read_values=False)
    assert report.problems == report.remarks == report.unexpected == ()
    assert report.num_files == (1 if max_shard_bytes > 10**6 else report.num_files) >= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_rounded_as_torch_rounds_them(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: pathlib.Path
) -> None:
    save_model("qwen3", tmp_path / "source", dtype=stored)
    source = open_source(tmp_path / "source")
    export_model(source, masters(source), tmp_path / "out", dtype=dtype)
    after = stored_tensors(tmp_path / "out")
    for name, tensor in stored_tensors(tmp_path / "source").items():
        assert torch.equal(after[name], tensor.float().to(dtype)), name
    said = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    assert said == str(dtype).removeprefix("torch.")
    assert load_whole(tmp_path / "out", "auto").dtype is dtype  # type: ignore[arg-type]


def test_bf16_files_hold_the_compute_weights_of_the_store(
    source: ModelSource, tmp_path: pathlib.Path
) -> None:
    """All kinds of fp32 bit patterns, rounded by the kernel that makes P16 and by the export."""
    name, shape = "lm_head.weight", source.parameters["lm_head.weight"]
    count = shape[0] * shape[1]
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int64)
    bits = bits.to(torch.int32)
    bits[::3] = (bits[::3] & -0x10000) | 0x8000  # exactly between two bf16 values
    bits[1::7] &= 0x807FFFFF - 2**32  # subnormal
    master = bits.view(torch.float32)
    master[master.isnan()] = -0.0
    rounded = torch.empty(count, dtype=torch.bfloat16)
    _native.convert(
        source=master.data_ptr(),
        source_format="fp32",
        target=rounded.data_ptr(),
        target_format="bf16",
        num_elements=count,
        num_threads=1,
    )
    others = [(one, tensor) for one, tensor in source.tensors() if one != name]
    export_model(source, [*others, (name, master.view(shape))], tmp_path / "out")
    found = stored_tensors(tmp_path / "out")[name]
    assert torch.equal(found.view(-1).view(torch.int16), rounded.view(torch.int16))


def test_experts_go_back_to_the_names_they_were_stored_under(tmp_path: pathlib.Path) -> None:
    save_mixtral(tmp_path / "source")
    source = open_source(tmp_path / "source")
    export_model(source, masters(source), tmp_path / "out", max_shard_bytes=9000)
    before, after = stored_tensors(tmp_path / "source"), stored_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    load_whole(tmp_path / "out")


@pytest.mark.parametrize("is_failing", [True, False])
def test_what_cannot_be_converted_back_is_written_under_the_model_s_own_name(
    is_failing: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_way_back(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if is_failing:
            raise NotImplementedError
        return {f"other.{name}": tensor for name, tensor in tensors.items()}

    save_mixtral(tmp_path / "source")
    source = open_source(tmp_path / "source")
    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", no_way_back)
    export_model(source, masters(source), tmp_path / "out")
    monkeypatch.undo()
    after = stored_tensors(tmp_path / "out")
    assert "model.layers.1.mlp.experts.gate_up_proj" in after
    judge = load_whole(tmp_path / "source")
    for name, parameter in load_whole(tmp_path / "out").named_parameters():
        assert torch.equal(parameter, judge.get_parameter(name))


@pytest.mark.parametrize("is_module", [True, False])
def test_a_model_made_from_its_configuration_is_laid_out_as_transformers_does(
    is_module: bool, tmp_path: pathlib.Path
) -> None:
    save_mixtral(tmp_path / "source")
    model = load_whole(tmp_path / "source")
    model.save_pretrained(tmp_path / "judge")
    given = model if is_module else model.config
    export_model(given, model.named_parameters(), tmp_path / "out")
    judge, after = stored_tensors(tmp_path / "judge"), stored_tensors(tmp_path / "out")
    assert judge.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in judge.items())
    assert (tmp_path / "out" / "generation_config.json").is_file()
    load_whole(tmp_path / "out")


def test_a_module_of_ones_own_is_whole_or_not_there(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="1 tensors of the model were not given: bias"):
        export_model(model, [("weight", model.weight)], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    report = export_model(model, model.named_parameters(), tmp_path / "out", dtype=torch.float32)
    assert report.files == ("model.safetensors",)
    after = stored_tensors(tmp_path / "out")
    assert all(torch.equal(after[name], one) for name, one in model.named_parameters())


def test_a_model_with_a_buffer_is_exported_with_it(tmp_path: pathlib.Path) -> None:
    save_model("bart", tmp_path / "source")
    tensors = stored_tensors(tmp_path / "source")
    tensors["final_logits_bias"] = torch.full((1, 61), 1.00390625, dtype=torch.float32)
    rewrite(tmp_path / "source" / "model.safetensors", tensors)
    source = open_source(tmp_path / "source")
    export_model(source, masters(source), tmp_path / "out")
    after = stored_tensors(tmp_path / "out")["final_logits_bias"]
    assert after.dtype is torch.float32
    assert torch.equal(after, tensors["final_logits_bias"])
    changed = torch.zeros(1, 61)
    buffers = {"final_logits_bias": changed, "not_of_the_files": changed}
    export_model(source, source.tensors(), tmp_path / "changed", buffers=buffers)
    assert torch.equal(stored_tensors(tmp_path / "changed")["final_logits_bias"], changed)


def test_names_without_the_prefix_stay_without_it(tmp_path: pathlib.Path) -> None:
    save_model("gpt2", tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = stored_tensors(tmp_path / "source")
    rewrite(path, {name.removeprefix("transformer."): one for name, one in tensors.items()})
    source = open_source(tmp_path / "source")
    export_model(source, masters(source), tmp_path / "out")
    after = stored_tensors(tmp_path / "out")
    assert after.keys() == stored_tensors(tmp_path / "source").keys()
    load_whole(tmp_path / "out")


def test_a_tie_the_weights_do_not_have_is_taken_out_of_the_configuration(
    tmp_path: pathlib.Path,
) -> None:
    save_model("qwen3", tmp_path / "source")
    tensors = stored_tensors(tmp_path / "source")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    rewrite(tmp_path / "source" / "model.safetensors", tensors)
    with pytest.warns(WeightsWarning):
        source = open_source(tmp_path / "source")
    export_model(source, masters(source), tmp_path / "out")
    model = load_whole(tmp_path / "out")
    assert model.config.tie_word_embeddings is False
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_tokenizer_template_and_settings_come_along(tmp_path: pathlib.Path) -> None:
    directory = save_model("llama", tmp_path / "source", is_with_tokenizer=True)
    transformers.GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(directory)
    fields = json.loads((directory / "config.json").read_text()) | {"our_note": 5}
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "LICENSE").write_text("free")
    (directory / "own.py").write_text("")
    (directory / "README.md").write_text("about another model")
    source = open_source(directory)
    export_model(source, source.tensors(), tmp_path / "out")
    out = tmp_path / "out"
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(out))
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("w3 w4")["input_ids"] == [3, 4]
    assert transformers.GenerationConfig.from_pretrained(str(out)).temperature == 0.25
    fields = json.loads((out / "config.json").read_text())
    assert fields["our_note"] == 5
    assert fields["use_cache"] is True
    assert (out / "LICENSE").read_text() == "free"
    assert not (out / "README.md").exists()
    assert not (out / "own.py").exists()


def test_a_given_tokenizer_takes_the_place_of_the_source_s(tmp_path: pathlib.Path) -> None:
    directory = save_model("llama", tmp_path / "source", is_with_tokenizer=True)
    source = open_source(directory)
    tokenizer = source.load_tokenizer()
    tokenizer.chat_template = "another"
    export_model(source, source.tensors(), tmp_path / "out", tokenizer=tokenizer)
    found = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert found.chat_template == "another"


def test_links_into_a_cache_become_files(tmp_path: pathlib.Path) -> None:
    blobs = save_model("llama", tmp_path / "blobs", is_with_tokenizer=True)
    (tmp_path / "source").mkdir()
    for path in blobs.iterdir():
        (tmp_path / "source" / path.name).symlink_to(path)
    source = open_source(tmp_path / "source")
    export_model(source, source.tensors(), tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_progress_ends_at_all_bytes(source: ModelSource, tmp_path: pathlib.Path) -> None:
    seen: list[tuple[int, int]] = []
    report = export_model(
        source, source.tensors(), tmp_path / "out", progress=lambda *one: seen.append(one)
    )
    assert seen[-1] == (report.total_bytes, report.total_bytes)
    assert seen == sorted(seen)


def test_named_templates_come_along(tmp_path: pathlib.Path) -> None:
    directory = save_model("llama", tmp_path / "source", is_with_tokenizer=True)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    source = open_source(directory)
    for _ in range(2):
        (tmp_path / "out").mkdir(exist_ok=True)
        export_model(source, source.tensors(), tmp_path / "out", should_merge=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
        assert tokenizer.chat_template == {"default": TEMPLATE, "tool_use": "tools"}


def test_a_filesystem_that_cannot_reserve_is_written_to_all_the_same(
    source: ModelSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    export_model(source, source.tensors(), tmp_path / "out")
    load_whole(tmp_path / "out")


def test_an_empty_directory_is_taken(source: ModelSource, tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").mkdir()
    export_model(source, source.tensors(), tmp_path / "out")
    load_whole(tmp_path / "out")


def test_a_merge_replaces_an_older_model_and_leaves_the_rest(
    source: ModelSource, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "trainer_state.json").write_text("{}")
    (out / "checkpoint-5").mkdir()
    for max_shard_bytes in (3000, 5000, 10**9):
        export_model(
            source, source.tensors(), out, should_merge=True, max_shard_bytes=max_shard_bytes
        )
        load_whole(out)
        assert check_model_directory(out).problems == ()
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint-5",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "trainer_state.json",
    ]


def test_a_merge_needs_no_other_filesystem_than_its_own(
    source: ModelSource, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def within(old: pathlib.Path, to: pathlib.Path) -> None:
        assert pathlib.Path(old).is_relative_to(tmp_path / "out")
        real(old, to)

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "rename", within)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "out")
    export_model(source, source.tensors(), tmp_path / "out", should_merge=True)
    load_whole(tmp_path / "out")


def test_a_link_to_an_empty_directory_is_filled(
    source: ModelSource, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    report = export_model(source, source.tensors(), tmp_path / "out")
    assert report.path == tmp_path / "real"
    assert (tmp_path / "out").is_symlink()
    load_whole(tmp_path / "out")


def test_the_code_of_a_trusted_model_comes_along(tmp_path: pathlib.Path) -> None:
    (tmp_path / "source").mkdir()
    save_own_code(tmp_path / "source", is_right=True)
    source = open_source(tmp_path / "source", trust_remote_code=True)
    export_model(source, source.tensors(), tmp_path / "out")
    again = open_source(tmp_path / "out", trust_remote_code=True)
    assert torch.equal(again.make_model().get_buffer("table"), torch.arange(4.0))
    assert {name for name, _ in again.tensors()} == {"layer.weight", "layer.bias"}


def test_a_tokenizer_is_not_needed(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path / "source")
    source = open_source(tmp_path / "source")
    report = export_model(source, source.tensors(), tmp_path / "out")
    assert report.remarks == ("there is no tokenizer beside the weights",)
    save_tokenizer(tmp_path / "out")
    assert check_model_directory(tmp_path / "out").remarks == ()
