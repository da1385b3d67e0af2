"""Building models without memory: awkward modules, and what is said about those that cannot be."""

import pathlib
from typing import Any

import pytest
import torch
import transformers

from lohan.errors import ConfigError
from lohan.train.weights.export_hf import export_model
from lohan.train.weights.meta_model import explained, model_class
from lohan.train.weights.source import open_source, source_of_config
from support.model_directories import load_whole, save_model, stored_tensors


class OwnConfig(transformers.PretrainedConfig):
    model_type = "lohan-test-own"


class Own(transformers.PreTrainedModel):
    """A model whose module is given; `_init_weights` computes what is in `values`."""

    config_class = OwnConfig
    module: Any = None
    values: Any = {}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        type(self).module(self)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if module is self:
            for name, value in type(self).values.items():
                self.get_buffer(name).copy_(value)


def own(build: Any, **values: torch.Tensor) -> Any:
    return type("Owned", (Own,), {"module": staticmethod(build), "values": values})


def test_parameters_of_other_types_take_on_the_compute_type_and_stay_shared() -> None:
    def build(self: Any) -> None:
        self.a = torch.nn.Linear(2, 2, dtype=torch.float32)
        self.b = torch.nn.Linear(2, 2, dtype=torch.float32)
        self.b.weight = self.a.weight

    model: Any = source_of_config(OwnConfig(), torch.float16, kind=own(build)).make_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert model.a.weight is model.b.weight


def test_a_parameter_of_whole_numbers_is_refused() -> None:
    def build(self: Any) -> None:
        self.a = torch.nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)

    with pytest.raises(ConfigError, match=r"a is of torch\.int32"):
        source_of_config(OwnConfig(), kind=own(build))


@pytest.mark.parametrize(
    "value", [torch.arange(3), torch.ones(3), torch.tensor([True, False]), torch.tensor(1j)]
)
def test_buffers_of_all_types_are_computed_or_missed(value: torch.Tensor) -> None:
    def build(self: Any) -> None:
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("table", torch.empty_like(value), persistent=False)

    right = source_of_config(OwnConfig(), kind=own(build, table=value))
    assert torch.equal(right.make_model().get_buffer("table"), value)
    wrong = source_of_config(OwnConfig(), kind=own(build))
    with pytest.raises(ConfigError, match="leaves buffers without a value: table"):
        wrong.make_model()


def test_code_that_fails_is_named() -> None:
    def build(self: Any) -> None:
        raise RuntimeError("no such size")

    with pytest.raises(ConfigError, match=r"Owned cannot be built.*no such size"):
        source_of_config(OwnConfig(), kind=own(build))


def test_a_tensor_without_elements_is_not_exported(tmp_path: pathlib.Path) -> None:
    def build(self: Any) -> None:
        self.a = torch.nn.Parameter(torch.zeros(0, 3))

    with pytest.raises(ConfigError, match=r"a has the shape \[0, 3\]"):
        export_model(source_of_config(OwnConfig(), kind=own(build)), [], tmp_path / "out")


def test_a_persistent_buffer_of_a_made_model_is_exported(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    save_model("bart", tmp_path / "source")
    model = load_whole(tmp_path / "source")
    export_model(model.config, model.named_parameters(), tmp_path / "out")
    assert torch.equal(stored_tensors(tmp_path / "out")["final_logits_bias"], torch.zeros(1, 61))
    load_whole(tmp_path / "out")


def test_a_body_is_given_its_head(tmp_path: pathlib.Path) -> None:
    save_model("qwen3", tmp_path / "whole")
    load_whole(tmp_path / "whole").model.save_pretrained(tmp_path / "body")
    source = open_source(tmp_path / "body")
    assert source.kind is transformers.Qwen3ForCausalLM
    export_model(source, source.tensors(), tmp_path / "out")
    assert type(load_whole(tmp_path / "out")) is transformers.Qwen3ForCausalLM


def test_a_configuration_without_a_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no model class fits.*'lohan-test-own'"):
        model_class(OwnConfig(), pathlib.Path("here"), trust_remote_code=False)


def test_a_missing_package_is_named_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match="a package is missing") as caught, explained("x", "y"):
        raise ModuleNotFoundError("No module named 'gguf'")
    assert "lohan[train]" in caught.value.remedy
