"""Sizes of the models known by name: the paper's, and widely used public ones.

Owns the numbers, no behaviour and no torch. Public ones are the fields of their published
configurations that decide shapes. Read by `names` and, when tracing, by `configs`.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """A model of the paper: a GPT, or a diffusion transformer."""

    num_layers: int
    num_heads: int
    hidden: int
    nominal_parameters: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicModel:
    """A public model: its configuration."""

    nominal_parameters: float
    settings: dict[str, Any]
    model_type: str | None = None
    """Of transformers; without it the settings name a class of diffusers."""


GPT_SEQUENCE = 1024
"""Positions of the paper's GPTs; more are added when a longer sequence is asked for."""


def _sizes(rows: dict[str, tuple[int, int, int, float]]) -> dict[str, PaperModel]:
    return {
        name: PaperModel(num_layers=layers, num_heads=heads, hidden=hidden, nominal_parameters=size)
        for name, (layers, heads, hidden, size) in rows.items()
    }


# The paper's TFLOPS of the 80-layer model count 70e9 parameters; one of its figures calls it 65B.
PAPER_GPTS = _sizes(
    {
        "gpt-1.55b": (48, 25, 1600, 1.55e9),
        "gpt-6b": (28, 32, 4096, 6e9),
        "gpt-13b": (40, 40, 5120, 13e9),
        "gpt-30b": (48, 56, 7168, 30e9),
        "gpt-65b": (80, 64, 8192, 65e9),
        "gpt-70b": (80, 64, 8192, 70e9),
        "gpt-135b": (88, 88, 11264, 135e9),
        "gpt-175b": (96, 96, 12288, 175e9),
        "gpt-276b": (112, 112, 14336, 276e9),
        "gpt-412b": (128, 128, 16384, 412e9),
    }
)

PAPER_DITS = _sizes(
    {
        "dit-0.67b": (28, 16, 1152, 0.67e9),
        "dit-0.90b": (30, 16, 1280, 0.90e9),
        "dit-1.4b": (32, 16, 1536, 1.4e9),
        "dit-10b": (28, 32, 4096, 10e9),
        "dit-20b": (40, 40, 5120, 20e9),
        "dit-40b": (48, 56, 7168, 40e9),
    }
)


def _decoder(
    *,
    layers: int,
    heads: int,
    key_value_heads: int,
    hidden: int,
    intermediate: int,
    vocabulary: int,
    longest_sequence: int,
    is_tied: bool = False,
    head_dim: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    head = {} if head_dim is None else {"head_dim": head_dim}
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest_sequence,
        "tie_word_embeddings": is_tied,
        **head,
        **more,
    }


def _llama_3_1(layers: int, heads: int, hidden: int, intermediate: int) -> dict[str, Any]:
    return _decoder(
        layers=layers,
        heads=heads,
        key_value_heads=8,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=128256,
        longest_sequence=131072,
    )


def _qwen3(layers: int, heads: int, hidden: int, intermediate: int) -> dict[str, Any]:
    return _decoder(
        layers=layers,
        heads=heads,
        key_value_heads=8,
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=151936,
        longest_sequence=40960,
        head_dim=128,
    )


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _decoder(
        layers=layers,
        heads=64,
        key_value_heads=8,
        hidden=2880,
        intermediate=2880,
        vocabulary=201088,
        longest_sequence=131072,
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
    )


def _gpt2(layers: int, heads: int, hidden: int) -> dict[str, Any]:
    return {
        "n_layer": layers,
        "n_head": heads,
        "n_embd": hidden,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


def _denoiser(name: str, *, layers: int, heads: int, text_width: int) -> dict[str, Any]:
    return {
        "_class_name": name,
        "num_layers": layers,
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "joint_attention_dim": text_width,
        "in_channels": 64,
    }


PUBLIC_MODELS = {
    "llama-3.1-8b": PublicModel(
        model_type="llama", nominal_parameters=8e9, settings=_llama_3_1(32, 32, 4096, 14336)
    ),
    "llama-3.1-70b": PublicModel(
        model_type="llama", nominal_parameters=70e9, settings=_llama_3_1(80, 64, 8192, 28672)
    ),
    "llama-3.1-405b": PublicModel(
        model_type="llama", nominal_parameters=405e9, settings=_llama_3_1(126, 128, 16384, 53248)
    ),
    "llama-2-13b": PublicModel(
        model_type="llama",
        nominal_parameters=13e9,
        settings=_decoder(
            layers=40,
            heads=40,
            key_value_heads=40,
            hidden=5120,
            intermediate=13824,
            vocabulary=32000,
            longest_sequence=4096,
        ),
    ),
    "qwen3-8b": PublicModel(
        model_type="qwen3", nominal_parameters=8e9, settings=_qwen3(36, 32, 4096, 12288)
    ),
    "qwen3-14b": PublicModel(
        model_type="qwen3", nominal_parameters=14e9, settings=_qwen3(40, 40, 5120, 17408)
    ),
    "qwen3-32b": PublicModel(
        model_type="qwen3", nominal_parameters=32e9, settings=_qwen3(64, 64, 5120, 25600)
    ),
    "mistral-7b": PublicModel(
        model_type="mistral",
        nominal_parameters=7e9,
        settings=_decoder(
            layers=32,
            heads=32,
            key_value_heads=8,
            hidden=4096,
            intermediate=14336,
            vocabulary=32768,
            longest_sequence=32768,
            head_dim=128,
            sliding_window=None,
        ),
    ),
    "gemma-3-1b": PublicModel(
        model_type="gemma3_text",
        nominal_parameters=1e9,
        settings=_decoder(
            layers=26,
            heads=4,
            key_value_heads=1,
            hidden=1152,
            intermediate=6912,
            vocabulary=262144,
            longest_sequence=32768,
            head_dim=256,
            is_tied=True,
            sliding_window=512,
        ),
    ),
    "gpt-oss-20b": PublicModel(
        model_type="gpt_oss", nominal_parameters=20e9, settings=_gpt_oss(24, 32)
    ),
    "gpt-oss-120b": PublicModel(
        model_type="gpt_oss", nominal_parameters=117e9, settings=_gpt_oss(36, 128)
    ),
    "qwen3-30b-a3b": PublicModel(
        model_type="qwen3_moe",
        nominal_parameters=30e9,
        settings=_decoder(
            layers=48,
            heads=32,
            key_value_heads=4,
            hidden=2048,
            intermediate=6144,
            vocabulary=151936,
            longest_sequence=40960,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
    ),
    "mixtral-8x7b": PublicModel(
        model_type="mixtral",
        nominal_parameters=47e9,
        settings=_decoder(
            layers=32,
            heads=32,
            key_value_heads=8,
            hidden=4096,
            intermediate=14336,
            vocabulary=32000,
            longest_sequence=32768,
            sliding_window=None,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
    ),
    "mistral-large": PublicModel(
        model_type="mistral",
        nominal_parameters=123e9,
        settings=_decoder(
            layers=88,
            heads=96,
            key_value_heads=8,
            hidden=12288,
            intermediate=28672,
            vocabulary=32768,
            longest_sequence=131072,
            head_dim=128,
            sliding_window=None,
        ),
    ),
    "smollm2-135m": PublicModel(
        model_type="llama",
        nominal_parameters=135e6,
        settings=_decoder(
            layers=30,
            heads=9,
            key_value_heads=3,
            hidden=576,
            intermediate=1536,
            vocabulary=49152,
            longest_sequence=8192,
            is_tied=True,
        ),
    ),
    "gpt2": PublicModel(model_type="gpt2", nominal_parameters=124e6, settings=_gpt2(12, 12, 768)),
    "gpt2-xl": PublicModel(
        model_type="gpt2", nominal_parameters=1.5e9, settings=_gpt2(48, 25, 1600)
    ),
    "flux-12b": PublicModel(
        nominal_parameters=12e9,
        settings={
            **_denoiser("FluxTransformer2DModel", layers=19, heads=24, text_width=4096),
            "num_single_layers": 38,
            "pooled_projection_dim": 768,
            "guidance_embeds": True,
        },
    ),
    "qwen-image-20b": PublicModel(
        nominal_parameters=20e9,
        settings=_denoiser("QwenImageTransformer2DModel", layers=60, heads=24, text_width=3584),
    ),
    "wan-14b": PublicModel(
        nominal_parameters=14e9,
        settings={
            "_class_name": "WanTransformer3DModel",
            "num_layers": 40,
            "num_attention_heads": 40,
            "attention_head_dim": 128,
            "ffn_dim": 13824,
            "text_dim": 4096,
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": [1, 2, 2],
        },
    ),
}

ALIASES = {
    "gpt-2": "gpt2",
    "gpt-2-xl": "gpt2-xl",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
    "meta-llama-3.1-405b": "llama-3.1-405b",
    "mistral-large-2407": "mistral-large",
    "mistral-large-instruct-2407": "mistral-large",
    "dit-0.9b": "dit-0.90b",
}
