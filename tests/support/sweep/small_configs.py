"""Small configurations of transformers' architectures.

Owns what `lohan.verify.scaling` does not scale: parts within parts, pictures, sounds, and settings
of single architectures (`_EXCEPTIONS`) that only fit together in ways of their own.
"""

from collections.abc import Mapping
from typing import Any

from lohan.errors import ConfigError
from lohan.verify.scaling import scale_transformers

_PATCH, _PATCHES_A_SIDE = 4, 4
_DROPOUT, _LAYER_DROP = 0.1, 0.3
_AT_MOST = {
    **dict.fromkeys(("num_mel_bins", "feature_size", "codebook_size", "num_codebooks"), 16),
    **dict.fromkeys(("depth", "conv_depthwise_kernel_size", "num_conv_pos_embeddings"), 3),
    **dict.fromkeys(("num_conv_pos_embedding_groups", "prompt_types", "zero_expert_num"), 2),
    **dict.fromkeys(("moe_topk", "top_k_experts", "index_topk", "index_n_heads"), 2),
    **dict.fromkeys(("mm_tokens_per_image", "num_query_tokens", "resampler_n_latents"), 4),
    **dict.fromkeys(("encoder_hash_byte_group_vocab", "ngram_vocab_size_base"), 64),
    **dict.fromkeys(("hidden_size_per_layer_input", "index_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("context_size", "max_text_len"), 16),
    **dict.fromkeys(("mask_time_length", "mask_feature_length"), 2),
    **dict.fromkeys(("num_local_layers", "num_global_layers"), 2),
}
_SIZE_WORDS = ("dim", "size", "hidden", "channel", "width", "rank", "filters")
_NO_SIZES = ("vocab", "image", "chunk", "window", "kernel", "window_size", "position")
_LARGE, _SMALL = 256, 64
"""A size that large, of whatever it is, becomes so small."""
_TOKENS = {
    **dict.fromkeys(("image_token_id", "image_token_index"), 250),
    **dict.fromkeys(("video_token_id", "video_token_index"), 251),
    "audio_token_id": 249,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}
"""Apart from each other, which remainders of the real ones need not be."""
_OF_TEXT_WIDTH = ("out_hidden_size", "text_hidden_size", "output_dim")

_TWO_KINDS = ["sliding_attention", "full_attention"] * 2
_GEMMA4_TEXT: dict[str, Any] = {
    "layer_types": _TWO_KINDS,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": None,
    "vocab_size_per_layer_input": 256,
}
_XLM = {"emb_dim": 32, "n_heads": 2, "n_words": 256}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "albert": {"hidden_size": 32, "embedding_size": 16},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bailing_hybrid": {
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
    },
    "beit": {"out_features": None, "out_indices": None},
    "codegen": {"n_head": 4, "n_embd": 64, "rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": _TWO_KINDS,
        "num_hidden_layers": 4,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _TWO_KINDS[:2]
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dinov2": {"out_features": None, "out_indices": None},
    "dinov2_with_registers": {"out_features": None, "out_indices": None},
    "dots1": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    },
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 4, "moe_layer_start_index": 1},
    "esm": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "flaubert": _XLM,
    "gemma3n_text": {
        "layer_types": _TWO_KINDS,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "intermediate_size": [32] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": 128,
    },
    "gemma4_text": _GEMMA4_TEXT,
    "gemma4_unified_text": _GEMMA4_TEXT,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2, "num_experts": 4},
    "idefics": {"cross_layer_interval": 1},
    "idefics_vision": {"embed_dim": 32, "num_attention_heads": 2, "intermediate_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4_vision_model": {"intermediate_size": 128},
    "longcat_flash": {"num_layers": 2},
    "ministral": {"head_dim": 16},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 96,
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        "hidden_size": 32,
        "attention_heads": 2,
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mobilebert": {
        "hidden_size": 64,
        "true_hidden_size": 32,
        "intra_bottleneck_size": 32,
        "embedding_size": 32,
    },
    "nemotron": {"num_key_value_heads": 2, "num_attention_heads": 2},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 32,
        "n_routed_experts": 4,
        "chunk_size": 8,
    },
    "qwen2_vl_vision": {"embed_dim": 32, "num_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 8,
    },
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (3, 4),
        "hidden_size": 32,
        "attention_head_size": 16,
        "attn_layers": ["local", "lsh", "local"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "feed_forward_size": 32,
    },
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xlm": _XLM,
    "xlnet": {"d_head": 16},
    "xlstm": {
        "hidden_size": 32,
        "embedding_dim": 32,
        "num_heads": 2,
        "num_hidden_layers": 3,
        "num_blocks": 3,
        "mode": "train",
        "chunk_size": 4,
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": [*["linear_attention"] * 2, "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1},
}
_LEFT_OUT = ("per_layer_config",)
"""What a configuration computes again from the rest."""
_ROTARY_PARTS = {"glm4v_moe_text": [2, 1, 1]}
_OTHER_ROTARY_PARTS = [2, 3, 3]
"""Of time, height and width, in a head of sixteen."""
_HAVE_ROTARY_PARTS = (
    *("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm4v_moe_text", "glm_ocr_text"),
    *("qwen2_5_omni_text", "paddleocr_vl_text", "glm46v_text"),
)


def small_config(kind: Any, *, has_dropout: bool) -> Any:
    """A small configuration of a model class.

    Args:
        has_dropout: switch on what is there and off.
    """
    settings = kind().to_dict()
    for name, part in kind.sub_configs.items():
        if "vision" in name and settings.get(name) is None and hasattr(part, "model_type"):
            settings[name] = part().to_dict()  # left out unless asked for
    settings = _shrunk(settings, kind.model_type)
    if has_dropout:
        settings = _with_dropout(settings)
    config = kind.from_dict(settings)
    if config.is_encoder_decoder and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    return config


def _shrunk(settings: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    settings = {key: value for key, value in settings.items() if key not in _LEFT_OUT}
    if model_type == "deepseek_v4":
        del settings["qk_rope_head_dim"]  # follows from the width of a head
    parts = {
        key: _shrunk(value, str(value.get("model_type") or f"{model_type}.{key}"))
        for key, value in settings.items()
        if isinstance(value, Mapping) and ("model_type" in value or key.endswith("_config"))
    }
    own = {key: value for key, value in settings.items() if key not in parts}
    try:
        own = scale_transformers(own).settings
    except ConfigError:  # a part without layers: its token ids still have to fit
        own = scale_transformers({**own, "num_layers": 1}).settings
        del own["num_layers"]
    for key, value in own.items():
        if type(value) is int and key in _AT_MOST:
            own[key] = min(value, _AT_MOST[key])
        elif key in _TOKENS:
            own[key] = _TOKENS[key]
        elif key == "depths":
            own[key] = [min(one, 2) for one in value]
        elif any(word in key for word in _SIZE_WORDS) and not any(no in key for no in _NO_SIZES):
            own[key] = _smaller(value)
    _shrink_pictures(own)
    if model_type in _HAVE_ROTARY_PARTS:
        sections = _ROTARY_PARTS.get(model_type, _OTHER_ROTARY_PARTS)
        own["rope_parameters"] = {**(own.get("rope_parameters") or {}), "mrope_section": sections}
    own.update(_EXCEPTIONS.get(model_type, {}))
    text = parts.get("text_config") or parts.get("llm_config") or {}
    for name, part in parts.items():
        for key in _OF_TEXT_WIDTH:
            if "text" not in name and type(part.get(key)) is int and "hidden_size" in text:
                part[key] = text["hidden_size"]
        if part.get("model_type") == "qwen2_vl_vision":
            part["hidden_size"] = text["hidden_size"]
    return own | parts


def _smaller(value: Any) -> Any:
    if type(value) is int and value >= _LARGE:
        return _SMALL
    are_numbers = isinstance(value, list | tuple) and all(type(one) is int for one in value)
    if not are_numbers or not value or max(value) < _LARGE:
        return value
    return [max(8, one * _SMALL // max(value) // 8 * 8) for one in value]


def _shrink_pictures(settings: dict[str, Any]) -> None:
    if settings.get("image_grid_pinpoints"):
        settings["image_grid_pinpoints"] = [[_PATCH * _PATCHES_A_SIDE] * 2]
    if type(settings.get("image_size")) is not int:
        return
    if type(settings.get("patch_size")) is int:
        settings["patch_size"] = min(settings["patch_size"], _PATCH)
        settings["image_size"] = settings["patch_size"] * _PATCHES_A_SIDE
    else:
        settings["image_size"] = min(settings["image_size"], 32)


def _with_dropout(settings: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(settings)
    for key, value in settings.items():
        if isinstance(value, Mapping):
            changed[key] = _with_dropout(value)
        elif isinstance(value, float) and "layerdrop" in key and value:
            changed[key] = _LAYER_DROP
        elif isinstance(value, float) and not value and ("dropout" in key or "pdrop" in key):
            changed[key] = _DROPOUT
    return changed
