"""A model given by its name is the one `from_pretrained` gives, in everything a forward can see."""

import pathlib
from typing import Any

import pytest
import torch

from lohan.errors import LohanWarning
from lohan.train.trainer.named_model import make_named, open_named, templated
from support import tiny_chat, tiny_models, trl_runs
from support.loss_families import FAMILIES, in_bf16

BUILDS = {name: family.build for name, family in FAMILIES.items() if "smoothed" not in name}
BUILDS["qwen3, tied"] = lambda: tiny_models.qwen3(0.0)
# How weights are stored, and whether kernels of the hub are used: no forward asks for them.
OF_LOADING = {"_weight_conversions", "_use_kernels"}


def seen(model: torch.nn.Module) -> dict[str, Any]:
    """Attributes of every module, by its name; settings as plain values."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name in vars(module).keys() - OF_LOADING - {"_parameters", "_buffers", "_modules"}:
            value = vars(module)[name]
            found[f"{path}: {name}"] = value.to_dict() if hasattr(value, "to_dict") else repr(value)
    first: dict[int, str] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        tied_to = first.setdefault(id(one), name)
        found[name] = (tied_to, one.shape, one.dtype, one.requires_grad)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[name] = (buffer.dtype, buffer.tolist())
    return found


@pytest.mark.parametrize("name", BUILDS)
def test_a_model_by_name_is_the_one_of_from_pretrained(tmp_path: pathlib.Path, name: str) -> None:
    made = in_bf16(BUILDS[name]())
    made.save_pretrained(tmp_path)
    by_name = make_named(open_named(str(tmp_path), None), None)
    loaded = type(made).from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    assert type(by_name) is type(loaded)
    assert seen(by_name) == seen(in_bf16(loaded))


def test_the_template_of_another_model_is_taken_without_its_tokens(tmp_path: pathlib.Path) -> None:
    tiny_chat.save_model(tmp_path / "model")
    other = tiny_chat.tokenizer()
    other.chat_template = "{{ messages[0]['content'] }}"
    other.add_tokens(["<|new|>"])
    other.save_pretrained(tmp_path / "other")
    args = trl_runs.sft_arguments(tmp_path / "out", chat_template_path=str(tmp_path / "other"))
    source = open_named(str(tmp_path / "model"), args)
    with pytest.warns(LohanWarning, match="no token of it"):
        tokenizer = templated(source, args, None)
    assert tokenizer.chat_template == other.chat_template
    assert len(tokenizer) == len(tiny_chat.tokenizer())
    assert args.chat_template_path is None
