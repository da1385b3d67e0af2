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
    **dict.fromkeys(("projection_dim", "projector_hidden_size", "mm_hidden_size"), 32),
    **dict.fromkeys(("qformer_hidden_size", "d_head", "perceiver_hidden_size"), 16),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size", "emb_dim"), 32),
    **dict.fromkeys(("depth", "conv_depthwise_kernel_size", "num_conv_pos_embeddings"), 3),
    **dict.fromkeys(("num_conv_pos_embedding_groups", "prompt_types", "zero_expert_num"), 2),
    **dict.fromkeys(("moe_topk", "top_k_experts", "index_topk"), 2),
}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4, "n_embd": 64, "rotary_dim": 8},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1},
    "dots1": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 4, "moe_layer_start_index": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "num_layers": 2},
    "ministral": {"head_dim": 16},
    "mobilebert": {"hidden_size": 64, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "nemotron": {"head_dim": 16},
    "qwen4_exp_text": {"head_dim": 16},
    "reformer": {
        "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4), "hidden_size": 32,
        "attention_head_size": 16, "attn_layers": ["local", "lsh", "local"],
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2,
        "feed_forward_size": 32, "is_decoder": True,
    },
    "xlm": {"emb_dim": 32, "n_heads": 2, "n_words": 256},
    "flaubert": {"emb_dim": 32, "n_heads": 2, "n_words": 256},
    "xlnet": {"d_head": 16},
    "xlstm": {"hidden_size": 32, "embedding_dim": 32, "num_heads": 2, "qk_dim_factor": 0.5},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1},
    "bailing_hybrid": {"head_dim": 16, "rotary_dim": 8, "partial_rotary_factor": 0.5},
    "esm": {"vocab_size": 64, "pad_token_id": 1, "mask_token_id": 2},
    "albert": {"hidden_size": 32, "embedding_size": 16},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "intermediate_size": [32] * 4, "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": 128,
    },
    "per_layer": {"per_layer_config": None},
}
_GEMMA4_TEXT: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
    "num_kv_shared_layers": 2, "per_layer_config": None, "hidden_size_per_layer_input": 8,
    "global_head_dim": 16,
}
for _name in ("gemma4_text", "gemma4_unified_text"):
    _EXCEPTIONS[_name] = _GEMMA4_TEXT


def small_config(kind: Any, *, model_type: str, has_dropout: bool) -> Any:
    """A small configuration of a model class.

    Args:
        has_dropout: switch on what is there and off.
    """
    settings = _shrunk(kind().to_dict(), model_type)
    if has_dropout:
        settings = _with_dropout(settings)
    config = kind.from_dict(settings)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _shrunk(settings: Mapping[str, Any], model_type: str) -> dict[str, Any]:
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
    for key, most in _AT_MOST.items():
        if type(own.get(key)) is int:
            own[key] = min(own[key], most)
    _shrink_pictures(own)
    own.update(_EXCEPTIONS.get(model_type, {}))
    return own | parts


def _shrink_pictures(settings: dict[str, Any]) -> None:
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
