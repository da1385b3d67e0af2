"""Checking a model directory: every kind of damage is a problem with a name."""

import json
import os
import pathlib
from typing import Any

import pytest
import torch

from lohan.train.weights.check_export import check_model_directory
from lohan.train.weights.checkpoint_files import INDEX_NAME
from support.model_directories import rewrite, save_model, stored_tensors


def test_a_whole_model_has_no_problems(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path, max_shard="4KB", is_with_tokenizer=True)
    seen: list[tuple[int, int]] = []
    report = check_model_directory(tmp_path, progress=lambda *one: seen.append(one))
    assert report.problems == report.remarks == report.unexpected == ()
    tensors = stored_tensors(tmp_path)
    assert report.architecture == "LlamaForCausalLM"
    assert report.num_tensors == len(tensors)
    assert report.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert report.total_bytes == 2 * report.num_parameters == seen[-1][0] == seen[-1][1]
    assert report.dtypes == {"bfloat16": len(tensors)}
    assert report.num_files == len(list(tmp_path.glob("*.safetensors")))


@pytest.mark.parametrize(
    ("tensor", "problem", "remark"),
    [
        (torch.full((16,), torch.nan), "norm.weight is NaN in all of its 16", ""),
        (torch.full((16,), torch.nan).index_fill(0, torch.tensor([3]), 1.0), "", "15 NaN and 0"),
        (torch.full((16,), -torch.inf), "", "0 NaN and 16 infinite"),
        (torch.ones(17), "norm.weight has the shape [17]", ""),
        (torch.ones(0), "norm.weight has the shape [0]", ""),
    ],
)
def test_bad_values_and_shapes_are_found(
    tensor: torch.Tensor, problem: str, remark: str, tmp_path: pathlib.Path
) -> None:
    save_model("llama", tmp_path, is_with_tokenizer=True)
    changed = stored_tensors(tmp_path) | {"model.norm.weight": tensor.bfloat16()}
    rewrite(tmp_path / "model.safetensors", changed)
    report = check_model_directory(tmp_path)
    assert [problem in one for one in report.problems] == ([True] if problem else [])
    assert [remark in one for one in report.remarks] == ([True] if remark else [])


def test_values_are_not_read_unless_asked(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path, is_with_tokenizer=True)
    nan = torch.full((16,), torch.nan, dtype=torch.bfloat16)
    rewrite(tmp_path / "model.safetensors", stored_tensors(tmp_path) | {"model.norm.weight": nan})
    assert check_model_directory(tmp_path, should_read_values=False).problems == ()


def test_a_missing_file_is_a_problem(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path, max_shard="4KB")
    next(tmp_path.glob("*.safetensors")).unlink()
    (problem,) = check_model_directory(tmp_path).problems
    assert "weights files are missing" in problem


def test_a_read_that_fails_is_a_problem(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> int:
        raise OSError(5, "Input/output error")

    save_model("llama", tmp_path)
    monkeypatch.setattr(os, "preadv", fail)
    (problem,) = check_model_directory(tmp_path).problems
    assert "cannot be read" in problem


def test_what_is_odd_but_works_is_a_remark(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path, max_shard="4KB")
    fields = json.loads((tmp_path / INDEX_NAME).read_text())
    fields["metadata"]["total_size"] += 2
    (tmp_path / INDEX_NAME).write_text(json.dumps(fields))
    config = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rewrite(tmp_path / "extra.safetensors", {"a": torch.ones(2)})
    report = check_model_directory(tmp_path)
    assert report.problems == ()
    remarks = " / ".join(report.remarks)
    assert "the index says" in remarks
    assert "not part of the model: extra.safetensors" in remarks
    assert "config.json says float32, the weights are bfloat16" in remarks
    assert "no tokenizer" in remarks
