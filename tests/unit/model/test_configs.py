import json

import pytest

from lohan.errors import ConfigError
from lohan.model import Growth, shape_of
from lohan.model.public_models import PUBLIC_MODELS
from support.hand_made import all_output_bytes

transformers = pytest.importorskip("transformers")

SMOLLM2 = {"model_type": "llama", **PUBLIC_MODELS["smollm2-135m"].settings, "num_hidden_layers": 2}


def written(folder, settings, name="config.json"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return path


@pytest.mark.parametrize(
    "form", ["folder", *(pytest.param(form, marks=pytest.mark.slow) for form in ("file", "text"))]
)
def test_a_transformers_configuration_gives_the_shape_of_its_model(tmp_path, form):
    file = written(tmp_path / "smol", SMOLLM2 | {"architectures": ["LlamaForCausalLM"]})
    shape = shape_of({"file": file, "folder": file.parent, "text": str(file)}[form])
    assert shape.name == "smol"
    assert shape.kinds == shape_of("smollm2-135m").kinds
    assert shape.sequence_of_kinds == (0, 1, 1, 2)
    assert shape.nominal_parameters is None


@pytest.mark.slow
def test_a_configuration_file_may_have_any_name(tmp_path):
    assert shape_of(written(tmp_path, SMOLLM2, "tiny.json")).name == "tiny"


def test_attention_dropout_in_a_configuration_does_not_make_a_score_matrix(tmp_path):
    settings = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "attn_pdrop": 0.1}
    block = shape_of(written(tmp_path, settings)).kinds[1]
    assert all_output_bytes(block).per_token_pair == 0
    assert any("dropout" in operator.name for operator in block.operators)


@pytest.mark.slow
def test_an_encoder_decoder_configuration(tmp_path):
    settings = {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_heads": 4,
        "num_layers": 3,
        "vocab_size": 97,
        "decoder_start_token_id": 0,
    }
    file = written(tmp_path, settings)
    shape = shape_of(file)
    names = [shape.kinds[kind].name for kind in shape.sequence_of_kinds]
    assert names == [
        "embedding",
        *["encoder.block", "encoder.block-2", "encoder.block-2"],
        "bridge",
        *["decoder.block", "decoder.block-2", "decoder.block-2"],
        "head",
    ]
    model = transformers.T5ForConditionalGeneration(transformers.T5Config.from_dict(settings))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_experts_cost_what_the_chosen_ones_compute(tmp_path):
    h, f, chosen = 32, 64, 2
    settings = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": h,
        "intermediate_size": f,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "num_local_experts": 4,
        "num_experts_per_tok": chosen,
    }
    block = shape_of(written(tmp_path, settings)).kinds[1]
    matrices = 3 * h * h + 4 * h + chosen * 3 * h * f
    assert block.forward_flops == Growth(per_token=2 * matrices, per_token_pair=4 * h)
    assert block.backward_flops == Growth(per_token=4 * matrices, per_token_pair=10 * h)


@pytest.mark.slow
def test_layers_left_out_at_random_are_counted(tmp_path):
    settings = {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "layerdrop": 0.1,
    }
    assert shape_of(written(tmp_path, settings)).num_blocks == 4


@pytest.mark.slow
def test_a_masked_language_model(tmp_path):
    settings = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 97,
    }
    shape = shape_of(written(tmp_path, settings))
    assert shape.num_blocks == 4
    assert shape.kinds[1].forward_flops == Growth(per_token=2 * 8 * 32**2, per_token_pair=4 * 32)


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_a_diffusers_folder(tmp_path, is_pipeline):
    pytest.importorskip("diffusers")
    settings = {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 3,
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 8,
        "patch_size": 2,
        "norm_type": "ada_norm_zero",
        "num_embeds_ada_norm": 10,
    }
    written(tmp_path, settings, "transformer/config.json" if is_pipeline else "config.json")
    shape = shape_of(tmp_path)
    assert shape.tokens_per_sample == 64
    assert shape.num_blocks == 5
    assert shape.kinds[1].input_bytes == Growth(per_sequence=64 * 32 * 2)


@pytest.mark.slow
def test_a_diffusers_model_with_two_lists_of_blocks(tmp_path):
    pytest.importorskip("diffusers")
    settings = {
        "_class_name": "FluxTransformer2DModel",
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 3,
        "in_channels": 8,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 12,
        "axes_dims_rope": [4, 6, 6],
        "guidance_embeds": True,
    }
    shape = shape_of(written(tmp_path, settings))
    names = [shape.kinds[kind].name for kind in shape.sequence_of_kinds]
    assert names.count("transformer_blocks") == 2
    assert names.count("single_transformer_blocks") == 3


def test_a_sequence_beyond_a_configurations_positions_is_refused(tmp_path):
    file = written(tmp_path, {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2})
    with pytest.raises(ConfigError, match="it has 1024 learned positions"):
        shape_of(file, sequence=1025)


@pytest.mark.slow
def test_a_model_with_few_positions_is_traced_within_them(tmp_path):
    settings = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16}
    assert shape_of(written(tmp_path, settings)).num_blocks == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "is not the configuration of a model: it is no JSON object"),
        ({"hidden_size": 8}, "is not the configuration of a model"),
        ({"model_type": "nothing-like-it"}, "model_type 'nothing-like-it': .* knows no such model"),
        ({"model_type": ["llama"]}, "knows no such model"),
        (
            {"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7},
            r"hidden size \(100\) is not a multiple",
        ),
        ({"model_type": "llama", "hidden_size": "wide"}, "does not make a model with transformers"),
        ({"_class_name": "NoSuchModel"}, "does not make a model with diffusers"),
        ({"_class_name": "DDIMScheduler"}, "describes a DDIMScheduler: it is not a model"),
    ],
)
def test_a_file_that_is_no_model_is_refused_with_the_reason(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(written(tmp_path, settings))


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"holds no model configuration.*model.safetensors"):
        shape_of(tmp_path)


@pytest.mark.parametrize("package", ["transformers", "diffusers"])
def test_a_missing_package_is_named_with_how_to_install_it(tmp_path, monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    key = {"transformers": "model_type", "diffusers": "_class_name"}[package]
    with pytest.raises(ConfigError, match=rf"needs the package {package}.*lohan\[models\]"):
        shape_of(written(tmp_path, {key: "x"}))


def test_code_that_comes_with_a_configuration_is_never_run(tmp_path):
    settings = SMOLLM2 | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    written(tmp_path, "raise SystemExit('ran')", "evil.py")
    assert shape_of(written(tmp_path, settings)).kinds == shape_of("smollm2-135m").kinds
