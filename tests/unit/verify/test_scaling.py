"""Configurations made smaller: sizes stay consistent, and every kind of layer stays."""

from typing import Any

import pytest
import transformers

from lohan.errors import ConfigError
from lohan.verify.scaling import scale_diffusers, scale_transformers


def scaled(model_type: str, **settings: Any) -> dict[str, Any]:
    config = transformers.AutoConfig.for_model(model_type, **settings)
    return scale_transformers(config.to_dict()).settings


def test_heads_widths_and_vocabulary_shrink_together() -> None:
    small = scaled(
        "llama",
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        bos_token_id=128000,
        eos_token_id=[128001, 128008],
    )
    assert small["hidden_size"] == small["num_attention_heads"] * small["head_dim"] == 64
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (4, 2)
    assert small["intermediate_size"] / small["hidden_size"] == 14336 / 4096
    assert small["vocab_size"] == 256
    assert small["bos_token_id"] < 256
    assert max(small["eos_token_id"]) < 256
    assert small["num_hidden_layers"] == 3


def test_a_width_that_is_not_that_of_all_heads_stays_another_one() -> None:
    small = scaled("qwen3", hidden_size=1024, num_attention_heads=16, head_dim=128)
    assert small["hidden_size"] != small["num_attention_heads"] * small["head_dim"]


def test_sizes_that_are_small_already_stay() -> None:
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(**sizes)
    assert scale_transformers(config.to_dict()).changes == ()


def test_one_layer_of_every_kind_is_left() -> None:
    small = scaled("gemma3_text", num_hidden_layers=26)
    assert set(small["layer_types"]) == {"sliding_attention", "full_attention"}
    assert len(small["layer_types"]) == small["num_hidden_layers"]
    assert small["sliding_window"] == 8


def test_lists_that_name_layers_by_number_name_those_that_are_left() -> None:
    settings = {
        "num_hidden_layers": 40,
        "hidden_size": 16,
        "cross_attention_layers": [3, 8, 13],
        "moe_layers": list(range(40)),
        "layer_types": ["a"] * 39 + ["b"],
        "mlp_only_layers": [],
    }
    small = scale_transformers(settings).settings
    assert small["num_hidden_layers"] == 3
    assert small["layer_types"] == ["a", "a", "b"]
    assert small["moe_layers"] == [0, 1, 2]
    assert small["cross_attention_layers"] == []
    assert small["mlp_only_layers"] == []


def test_experts_become_few_and_some_are_still_chosen() -> None:
    small = scaled("mixtral", num_local_experts=8)
    assert (small["num_local_experts"], small["num_experts_per_tok"]) == (4, 2)
    latent = scaled("deepseek_v3")
    assert latent["n_routed_experts"] % latent["n_group"] == 0
    assert latent["qk_head_dim"] == latent["qk_rope_head_dim"] + latent["qk_nope_head_dim"]


def test_learned_positions_shrink_and_rotary_ones_stay() -> None:
    assert scaled("gpt2")["n_positions"] == 64
    assert scaled("llama", max_position_embeddings=8192)["max_position_embeddings"] == 8192


def test_lists_by_pair_of_rotary_elements_fit_the_smaller_head() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
    }
    small = scaled("phi3", hidden_size=3072, num_attention_heads=32, rope_parameters=rope)
    head = small["hidden_size"] // small["num_attention_heads"]
    assert len(small["rope_parameters"]["long_factor"]) == head // 2


def test_quantization_is_left_out() -> None:
    settings = transformers.LlamaConfig().to_dict() | {"quantization_config": {"bits": 4}}
    assert "quantization_config" not in scale_transformers(settings).settings


def test_what_has_no_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be scaled down"):
        scale_transformers({"hidden_size": 64})
    with pytest.raises(ConfigError, match="cannot be scaled down"):
        scale_diffusers({"_class_name": "UNet2DModel", "block_out_channels": [32, 64]})


def test_widths_of_an_image_model_shrink_with_its_heads() -> None:
    settings = {
        "num_layers": 28,
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "cross_attention_dim": 1152,
        "caption_channels": 4096,
        "sample_size": 128,
        "use_additional_conditions": None,
    }
    small = scale_diffusers(settings).settings
    width = small["num_attention_heads"] * small["attention_head_dim"]
    assert small["cross_attention_dim"] == width
    assert width % 12 == 0
    # What the model would have concluded from the size of its images is said.
    assert small["use_additional_conditions"] is True
    assert small["sample_size"] == 8


def test_axes_of_rotary_image_positions_add_up_to_the_head() -> None:
    settings = {
        "num_layers": 19,
        "num_single_layers": 38,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56],
    }
    small = scale_diffusers(settings)
    assert sum(small.settings["axes_dims_rope"]) == small.settings["attention_head_dim"]
    assert all(axis % 2 == 0 for axis in small.settings["axes_dims_rope"])
    assert "num_single_layers 38 -> 3" in small.changes
