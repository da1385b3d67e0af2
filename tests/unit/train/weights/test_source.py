"""Opening a model: every tensor once, bit for bit, and a module ready for it."""

import json
import pathlib

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lohan.errors import ConfigError
from lohan.train.weights.source import WeightsWarning, open_source
from support.model_directories import (
    FAMILIES,
    load_whole,
    rewrite,
    save_deepseek,
    save_mixtral,
    save_model,
    save_own_code,
    save_tokenizer,
    stored_tensors,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_shard", ["1GB", "4KB"])
def test_every_parameter_comes_once_as_it_is_stored(
    family: str, max_shard: str, tmp_path: pathlib.Path
) -> None:
    save_model(family, tmp_path, max_shard=max_shard)
    source = open_source(tmp_path)
    judge = dict(load_whole(tmp_path).named_parameters())
    came: dict[str, torch.Tensor] = {}
    for name, tensor in source.tensors():
        assert name not in came
        came[name] = tensor
    assert came.keys() == judge.keys() == source.parameters.keys()
    for name, tensor in came.items():
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, judge[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_stored_type_is_kept(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path, dtype=dtype, max_shard="4KB")
    judge = stored_tensors(tmp_path)
    for name, tensor in open_source(tmp_path).tensors():
        assert tensor.dtype is dtype
        assert torch.equal(tensor, judge[name])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore::lohan.train.weights.source.WeightsWarning")
def test_a_module_has_meta_parameters_and_the_buffers_of_a_loaded_model(
    family: str, dtype: torch.dtype, tmp_path: pathlib.Path
) -> None:
    save_model(family, tmp_path)
    model = open_source(tmp_path, dtype=dtype).make_model()
    judge = load_whole(tmp_path, dtype)
    assert type(model) is type(judge)
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in judge.named_parameters()
    }
    for parameter in model.parameters():
        assert parameter.is_meta
        assert parameter.dtype is dtype
        assert parameter.requires_grad
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(judge.named_buffers()).keys()
    for name, buffer in judge.named_buffers():
        assert buffers[name].dtype is buffer.dtype
        assert torch.equal(buffers[name], buffer), name
    assert model.training


def test_a_module_with_its_tensors_computes_what_the_loaded_model_does(
    tmp_path: pathlib.Path,
) -> None:
    save_model("llama", tmp_path, max_shard="4KB")
    source = open_source(tmp_path)
    model = source.make_model().eval()
    model.load_state_dict(dict(source.tensors()), assign=True)
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens).logits, load_whole(tmp_path)(tokens).logits)


def test_scaled_rotary_frequencies_are_computed(tmp_path: pathlib.Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    buffers = dict(open_source(tmp_path).make_model().named_buffers())
    for name, buffer in load_whole(tmp_path).named_buffers():
        assert torch.equal(buffers[name], buffer)


def test_a_checkpoint_of_the_body_alone_serves_a_tied_model(tmp_path: pathlib.Path) -> None:
    save_model("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    rewrite(path, {n.removeprefix("transformer."): t for n, t in stored_tensors(tmp_path).items()})
    judge = load_whole(tmp_path)
    for name, tensor in open_source(tmp_path).tensors():
        assert torch.equal(tensor, judge.get_parameter(name))


@pytest.mark.parametrize("has_stored_buffer", [False, True])
def test_weights_that_stay_on_the_hub_are_planned_for_and_not_given(
    has_stored_buffer: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_stored_buffer:  # with a value that no code computes
        save_deepseek(tmp_path)
    else:
        save_model("llama", tmp_path, max_shard="4KB")
    monkeypatch.setattr("lohan.train.weights.model_places._download", lambda *_: tmp_path)
    whole = open_source("someone/model", should_fetch=False)
    assert whole.has_weights
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    source = open_source("someone/model", should_fetch=False)
    assert not source.has_weights
    assert source.parameters == whole.parameters
    assert source.identity == whole.identity
    model = source.make_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    with pytest.raises(ConfigError, match="has no weights"):
        next(source.tensors())


def test_a_tied_weight_stored_under_its_other_name_is_found(tmp_path: pathlib.Path) -> None:
    save_model("qwen3", tmp_path)
    tensors = stored_tensors(tmp_path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    rewrite(tmp_path / "model.safetensors", tensors)
    came = dict(open_source(tmp_path).tensors())
    assert torch.equal(came["model.embed_tokens.weight"], tensors["lm_head.weight"])
    assert "lm_head.weight" not in came


def test_a_tied_weight_stored_twice_comes_once(tmp_path: pathlib.Path) -> None:
    save_model("qwen3", tmp_path)
    tensors = stored_tensors(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(tmp_path / "model.safetensors", tensors)
    source = open_source(tmp_path)
    names = [name for name, _ in source.tensors()]
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names
    model = source.make_model()
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_tied_weights_with_different_values_are_two_tensors(tmp_path: pathlib.Path) -> None:
    save_model("qwen3", tmp_path)
    tensors = stored_tensors(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    rewrite(tmp_path / "model.safetensors", tensors)
    with pytest.warns(WeightsWarning, match="ties lm_head.weight"):
        source = open_source(tmp_path)
    came = dict(source.tensors())
    assert torch.equal(came["lm_head.weight"], tensors["lm_head.weight"])
    model = source.make_model()
    assert model.lm_head.weight is not model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_experts_stored_apart_are_joined_as_transformers_joins_them(
    tmp_path: pathlib.Path,
) -> None:
    save_mixtral(tmp_path)
    assert any("experts.1.w3" in name for name in stored_tensors(tmp_path))
    judge = load_whole(tmp_path)
    came = dict(open_source(tmp_path).tensors())
    assert came.keys() == dict(judge.named_parameters()).keys()
    for name, tensor in came.items():
        assert torch.equal(tensor, judge.get_parameter(name)), name


def test_a_missing_tensor_is_named(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    tensors = stored_tensors(tmp_path)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
    rewrite(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"2 tensors.*layers.1.mlp.up_proj.weight, lm_head"):
        open_source(tmp_path)


def test_an_extra_tensor_is_warned_of_and_left_out(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    tensors = stored_tensors(tmp_path) | {"model.extra.weight": torch.ones(3)}
    rewrite(tmp_path / "model.safetensors", tensors)
    with pytest.warns(WeightsWarning, match=r"model.extra.weight"):
        source = open_source(tmp_path)
    assert source.unexpected == ("model.extra.weight",)
    assert "model.extra.weight" not in dict(source.tensors())


def test_frequencies_in_an_old_checkpoint_are_ignored_quietly(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    rewrite(tmp_path / "model.safetensors", stored_tensors(tmp_path) | old)
    assert open_source(tmp_path).unexpected == ()


def test_two_tensors_for_one_place_are_refused(tmp_path: pathlib.Path) -> None:
    save_model("gpt2", tmp_path)
    tensors = stored_tensors(tmp_path)
    tensors["wpe.weight"] = tensors["transformer.wpe.weight"].clone()
    rewrite(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"transformer\.wpe\.weight, wpe\.weight are all stored"):
        open_source(tmp_path)


def test_experts_that_do_not_fit_together_are_refused(tmp_path: pathlib.Path) -> None:
    save_mixtral(tmp_path)
    (shard,) = (
        path
        for path in tmp_path.glob("*.safetensors")
        if any("layers.0.block_sparse_moe.experts.1.w2" in name for name in load_file(path))
    )
    tensors = load_file(shard)
    name = next(name for name in tensors if "layers.0.block_sparse_moe.experts.1.w2" in name)
    rewrite(shard, tensors | {name: torch.ones(3, 3, dtype=torch.bfloat16)})
    with pytest.raises(ConfigError, match=r"do not make model\.layers\.0\.mlp\.experts\.down_proj"):
        open_source(tmp_path)


def test_a_wrong_shape_is_named(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    tensors = stored_tensors(tmp_path)
    tensors["model.norm.weight"] = torch.ones(17, dtype=torch.bfloat16)
    rewrite(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"model.norm.weight has the shape \[17\].*\[16\]"):
        open_source(tmp_path)


def test_a_type_without_exact_masters_is_refused(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"stored as torch\.float64"):
        open_source(tmp_path)


def test_quantized_weights_are_refused(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="quantized \\(gptq\\)"):
        open_source(tmp_path)


def test_only_16_bit_types_compute(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="not a compute type"):
        open_source(tmp_path, dtype=torch.float32)


def test_the_code_of_a_model_is_not_run_unless_trusted(tmp_path: pathlib.Path) -> None:
    save_own_code(tmp_path)
    with pytest.raises(ConfigError, match="configuration"):
        open_source(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore")
def test_trusted_code_that_leaves_a_buffer_empty_is_named(tmp_path: pathlib.Path) -> None:
    save_own_code(tmp_path)
    source = open_source(tmp_path, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match="leaves buffers without a value: table"):
        source.make_model()


def test_a_buffer_transformers_keeps_in_fp32_is_kept_so(tmp_path: pathlib.Path) -> None:
    save_deepseek(tmp_path)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    found = open_source(tmp_path).make_model().get_buffer(name)
    judge = load_whole(tmp_path).get_buffer(name)
    assert found.dtype is judge.dtype is torch.float32
    assert torch.equal(found, judge)


def test_parameters_kept_in_fp32_elsewhere_are_warned_of(tmp_path: pathlib.Path) -> None:
    save_model("t5", tmp_path)
    with pytest.warns(WeightsWarning, match="keeps wo of T5ForConditionalGeneration in fp32"):
        open_source(tmp_path, dtype=torch.float16)


def test_the_tokenizer_and_the_generation_settings_come_along(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    save_tokenizer(tmp_path)
    transformers.GenerationConfig(temperature=0.3, do_sample=True).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert source.load_tokenizer()("w3 w4")["input_ids"] == [3, 4]
    assert source.make_model().generation_config.temperature == 0.3  # type: ignore[union-attr]


def test_a_missing_tokenizer_is_an_error_of_ours(tmp_path: pathlib.Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="tokenizer"):
        open_source(tmp_path).load_tokenizer()
