"""Diffusers' denoisers, tiny: settings and inputs by class.

An input is a function of a generator and a type, so that every micro-batch has values of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Make = Callable[[torch.Generator, torch.dtype], Any]


@dataclass(frozen=True, kw_only=True)
class Denoiser:
    """Settings of a small model and what its forward takes."""

    settings: dict[str, Any]
    inputs: dict[str, Make]


def floats(*shape: int) -> Make:
    """Normal noise."""
    return lambda generator, dtype: torch.randn(shape, generator=generator).to(dtype)


def whole(below: int, *shape: int) -> Make:
    """Whole numbers."""
    return lambda generator, _: torch.randint(0, below, shape, generator=generator)


def ones(*shape: int, dtype: torch.dtype = torch.bool) -> Make:
    """A mask that leaves the end of the first row out."""

    def make(_: torch.Generator, __: torch.dtype) -> torch.Tensor:
        mask = torch.ones(shape, dtype=dtype)
        mask[0, -1] = 0
        return mask

    return make


def given(value: Any) -> Make:
    """Always the same."""
    return lambda _, __: value


def several(*parts: Make) -> Make:
    """A list."""
    return lambda generator, dtype: [part(generator, dtype) for part in parts]


def _ids(num: int, width: int) -> Make:
    places = torch.arange(num * width).view(num, width) % 5
    return given(places.to(torch.float32))


def _denoiser(settings: dict[str, Any], **inputs: Make) -> Denoiser:
    return Denoiser(settings=settings, inputs=inputs)


_TIME = whole(1000, 2)
_SHARE = floats(2)
_IMAGE = floats(2, 4, 8, 8)
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}
_FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "axes_dims_rope": (4, 2, 2),
}
_FLUX_INPUTS: dict[str, Make] = {
    "hidden_states": floats(2, 6, 4),
    "encoder_hidden_states": floats(2, 5, 8),
    "timestep": _SHARE,
    "img_ids": _ids(6, 3),
    "txt_ids": _ids(5, 3),
}
_WAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 8,
    "ffn_dim": 16,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
_WAN_INPUTS: dict[str, Make] = {
    "hidden_states": floats(2, 4, 2, 4, 4),
    "encoder_hidden_states": floats(2, 5, 8),
    "timestep": _TIME,
}
_SIZES: dict[str, Make] = {
    "original_size": given(torch.full((2, 2), 20.0)),
    "target_size": given(torch.full((2, 2), 24.0)),
    "crop_coords": given(torch.zeros(2, 2)),
}
_COG: dict[str, Any] = {
    **_HEADS,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 4,
    "text_embed_dim": 8,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 8,
    "patch_size": 2,
    "max_text_seq_length": 8,
}
_COG_INPUTS: dict[str, Make] = {
    "hidden_states": floats(2, 1, 4, 8, 8),
    "encoder_hidden_states": floats(2, 8, 8),
    "timestep": _TIME,
}
_VIEW: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "sample_size": 8,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "text_embed_dim": 8,
    "time_embed_dim": 8,
    "condition_dim": 2,
    "pos_embed_max_size": 8,
}
_HUNYUAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "in_channels": 4,
    "out_channels": 4,
    "text_embed_dim": 8,
}
_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 2,
    "norm_num_groups": 4,
}

DENOISERS: dict[str, Denoiser] = {
    "DiTTransformer2DModel": _denoiser(
        {**_HEADS, "in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 8},
        hidden_states=_IMAGE,
        timestep=_TIME,
        class_labels=whole(8, 2),
    ),
    "PixArtTransformer2DModel": _denoiser(
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 8,
            "sample_size": 8,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "num_embeds_ada_norm": 8,
        },
        hidden_states=_IMAGE,
        encoder_hidden_states=floats(2, 5, 8),
        timestep=_TIME,
        added_cond_kwargs=given({"resolution": None, "aspect_ratio": None}),
    ),
    "SD3Transformer2DModel": _denoiser(
        {
            **_HEADS,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 8,
            "caption_projection_dim": 16,
            "pos_embed_max_size": 8,
            "pooled_projection_dim": 8,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        hidden_states=_IMAGE,
        encoder_hidden_states=floats(2, 5, 8),
        pooled_projections=floats(2, 8),
        timestep=_TIME,
    ),
    "FluxTransformer2DModel": _denoiser(
        {**_FLUX, "pooled_projection_dim": 8, "guidance_embeds": True},
        **_FLUX_INPUTS,
        pooled_projections=floats(2, 8),
        guidance=_SHARE,
    ),
    "ChromaTransformer2DModel": _denoiser(
        {
            **_FLUX,
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 2,
        },
        **_FLUX_INPUTS,
    ),
    "BriaTransformer2DModel": _denoiser(_FLUX, **_FLUX_INPUTS),
    "BriaFiboTransformer2DModel": _denoiser(
        {**_FLUX, "text_encoder_dim": 8},
        **_FLUX_INPUTS,
        text_encoder_layers=several(*[floats(2, 5, 8)] * 4),
    ),
    "LongCatImageTransformer2DModel": _denoiser(
        {**_FLUX, "pooled_projection_dim": 8}, **_FLUX_INPUTS
    ),
    "OvisImageTransformer2DModel": _denoiser({**_FLUX, "out_channels": 4}, **_FLUX_INPUTS),
    "Flux2Transformer2DModel": _denoiser(
        {**_FLUX, "axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 8},
        **{**_FLUX_INPUTS, "img_ids": _ids(6, 4), "txt_ids": _ids(5, 4)},
        guidance=_SHARE,
    ),
    "Flux3Transformer2DModel": _denoiser(
        {
            **{key: value for key, value in _FLUX.items() if key != "patch_size"},
            "axes_dims_rope": (2, 2, 2, 2),
            "timestep_channels": 8,
            "cond_in_channels": 4,
        },
        **{**_FLUX_INPUTS, "img_ids": _ids(6, 4), "txt_ids": _ids(5, 4)},
    ),
    "WanTransformer3DModel": _denoiser(_WAN, **_WAN_INPUTS),
    "WanVACETransformer3DModel": _denoiser(
        {**_WAN, "vace_layers": [0, 2], "vace_in_channels": 6},
        **_WAN_INPUTS,
        control_hidden_states=floats(2, 6, 2, 4, 4),
    ),
    "SkyReelsV2Transformer3DModel": _denoiser(_WAN, **_WAN_INPUTS),
    "ChronoEditTransformer3DModel": _denoiser({**_WAN, "rope_temporal_skip_len": 2}, **_WAN_INPUTS),
    "AnyFlowTransformer3DModel": _denoiser(
        _WAN,
        **{**_WAN_INPUTS, "hidden_states": floats(2, 2, 4, 4, 4), "timestep": floats(2, 2)},
        r_timestep=floats(2, 2),
    ),
    "QwenImageTransformer2DModel": _denoiser(
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 8,
            "axes_dims_rope": (8, 4, 4),
        },
        hidden_states=floats(2, 16, 16),
        encoder_hidden_states=floats(2, 5, 8),
        encoder_hidden_states_mask=ones(2, 5),
        timestep=_SHARE,
        img_shapes=given([[(1, 4, 4)], [(1, 4, 4)]]),
    ),
    "ZImageTransformer2DModel": _denoiser(
        {
            "in_channels": 4,
            "dim": 16,
            "n_layers": 3,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 8,
            "axes_dims": [4, 2, 2],
            "axes_lens": [64, 16, 16],
        },
        x=several(floats(4, 1, 4, 4), floats(4, 1, 4, 4)),
        t=_SHARE,
        cap_feats=several(floats(5, 8), floats(5, 8)),
    ),
    "Lumina2Transformer2DModel": _denoiser(
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 3,
            "num_refiner_layers": 1,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (32, 32, 32),
            "cap_feat_dim": 8,
        },
        hidden_states=_IMAGE,
        timestep=_SHARE,
        encoder_hidden_states=floats(2, 5, 8),
        encoder_attention_mask=ones(2, 5),
    ),
    "LuminaNextDiT2DModel": _denoiser(
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 24,
            "num_layers": 3,
            "num_attention_heads": 3,
            "num_kv_heads": 1,
            "multiple_of": 8,
            "cross_attention_dim": 8,
        },
        hidden_states=_IMAGE,
        timestep=_SHARE,
        encoder_hidden_states=floats(2, 5, 8),
        encoder_mask=ones(2, 5),
        image_rotary_emb=given(torch.polar(torch.ones(16, 16, 4), torch.ones(16, 16, 4))),
        cross_attention_kwargs=given({}),
    ),
    "HiDreamImageTransformer2DModel": _denoiser(
        {
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_channels": [8, 4],
            "text_emb_dim": 8,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "axes_dims_rope": (4, 2, 2),
            "max_resolution": (8, 8),
            "llama_layers": (0, 1, 1, 0),
        },
        hidden_states=_IMAGE,
        timesteps=_TIME,
        encoder_hidden_states_t5=floats(2, 6, 8),
        encoder_hidden_states_llama3=floats(2, 2, 6, 4),
        pooled_embeds=floats(2, 8),
    ),
    "MochiTransformer3DModel": _denoiser(
        {
            **_HEADS,
            "patch_size": 2,
            "pooled_projection_dim": 16,
            "in_channels": 12,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 16,
        },
        hidden_states=floats(2, 12, 2, 8, 8),
        encoder_hidden_states=floats(2, 16, 16),
        timestep=_TIME,
        encoder_attention_mask=ones(2, 16),
    ),
    "HunyuanDiT2DModel": _denoiser(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 4,
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 16,
            "cross_attention_dim": 8,
            "cross_attention_dim_t5": 8,
            "text_len": 4,
            "pooled_projection_dim": 4,
            "text_len_t5": 4,
        },
        hidden_states=_IMAGE,
        timestep=_SHARE,
        encoder_hidden_states=floats(2, 4, 8),
        text_embedding_mask=ones(2, 4),
        encoder_hidden_states_t5=floats(2, 4, 8),
        text_embedding_mask_t5=ones(2, 4),
        image_meta_size=floats(2, 6),
        style=whole(1, 2),
        image_rotary_emb=several(given(torch.ones(1, 8)), given(torch.zeros(1, 8))),
    ),
    "HunyuanVideoTransformer3DModel": _denoiser(
        {
            **_HUNYUAN,
            "patch_size": 1,
            "patch_size_t": 1,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
        },
        hidden_states=floats(2, 4, 1, 4, 4),
        timestep=_TIME,
        encoder_hidden_states=floats(2, 5, 8),
        pooled_projections=floats(2, 8),
        encoder_attention_mask=ones(2, 5),
        guidance=_TIME,
    ),
    "HunyuanImageTransformer2DModel": _denoiser(
        {**_HUNYUAN, "rope_axes_dim": (4, 6)},
        hidden_states=floats(2, 4, 4, 4),
        timestep=_SHARE,
        encoder_hidden_states=floats(2, 5, 8),
        encoder_attention_mask=ones(2, 5),
    ),
    "HunyuanVideo15Transformer3DModel": _denoiser(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 3,
            "num_refiner_layers": 1,
            "in_channels": 9,
            "out_channels": 4,
            "text_embed_dim": 8,
            "text_embed_2_dim": 8,
            "image_embed_dim": 8,
            "rope_axes_dim": (2, 4, 4),
            "target_size": 16,
        },
        hidden_states=floats(2, 9, 1, 4, 4),
        timestep=_SHARE,
        encoder_hidden_states=floats(2, 5, 8),
        encoder_attention_mask=ones(2, 5),
        encoder_hidden_states_2=floats(2, 4, 8),
        encoder_attention_mask_2=ones(2, 4),
        image_embeds=floats(2, 3, 8),
    ),
    "AuraFlowTransformer2DModel": _denoiser(
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pos_embed_max_size": 64,
        },
        hidden_states=_IMAGE,
        encoder_hidden_states=floats(2, 5, 32),
        timestep=_SHARE,
    ),
    "CogVideoXTransformer3DModel": _denoiser(_COG, **_COG_INPUTS),
    "ConsisIDTransformer3DModel": _denoiser(
        {**_COG, "cross_attn_dim_head": 8, "cross_attn_num_heads": 2}, **_COG_INPUTS
    ),
    "CogView3PlusTransformer2DModel": _denoiser(
        _VIEW,
        hidden_states=_IMAGE,
        encoder_hidden_states=floats(2, 6, 8),
        timestep=_TIME,
        **_SIZES,
    ),
    "CogView4Transformer2DModel": _denoiser(
        {**_VIEW, "rope_axes_dim": (8, 8)},
        hidden_states=_IMAGE,
        encoder_hidden_states=floats(2, 6, 8),
        timestep=_TIME,
        **_SIZES,
    ),
    "AllegroTransformer3DModel": _denoiser(
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 8,
            "caption_channels": 8,
        },
        hidden_states=floats(2, 4, 2, 8, 8),
        encoder_hidden_states=floats(2, 5, 8),
        timestep=_TIME,
    ),
    "CosmosTransformer3DModel": _denoiser(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 3,
            "in_channels": 4,
            "out_channels": 4,
            "mlp_ratio": 2,
            "text_embed_dim": 8,
            "adaln_lora_dim": 4,
            "max_size": (4, 16, 16),
        },
        hidden_states=floats(2, 4, 1, 8, 8),
        timestep=_TIME,
        encoder_hidden_states=floats(2, 5, 8),
        fps=given(30),
    ),
    "LTXVideoTransformer3DModel": _denoiser(
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 16,
            "caption_channels": 8,
        },
        hidden_states=floats(2, 32, 4),
        encoder_hidden_states=floats(2, 5, 8),
        timestep=_TIME,
        encoder_attention_mask=ones(2, 5),
        num_frames=given(2),
        height=given(4),
        width=given(4),
    ),
    "LatteTransformer3DModel": _denoiser(
        {
            **_HEADS,
            "sample_size": 8,
            "patch_size": 2,
            "caption_channels": 8,
            "in_channels": 4,
            "out_channels": 8,
            "cross_attention_dim": 16,
            "attention_bias": True,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 8,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "video_length": 2,
        },
        hidden_states=floats(2, 4, 2, 8, 8),
        encoder_hidden_states=floats(2, 5, 8),
        timestep=_TIME,
        enable_temporal_attentions=given(True),
    ),
    "SanaTransformer2DModel": _denoiser(
        {
            **_HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 8,
            "sample_size": 8,
        },
        hidden_states=_IMAGE,
        encoder_hidden_states=floats(2, 5, 8),
        timestep=_TIME,
    ),
    "SanaVideoTransformer3DModel": _denoiser(
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "num_layers": 3,
            "in_channels": 4,
            "out_channels": 4,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 24,
            "caption_channels": 8,
            "sample_size": 8,
            "rope_max_seq_len": 32,
        },
        hidden_states=floats(2, 4, 2, 8, 8),
        encoder_hidden_states=floats(2, 5, 8),
        timestep=_TIME,
    ),
    "PRXTransformer2DModel": _denoiser(
        {
            "in_channels": 4,
            "patch_size": 2,
            "context_in_dim": 8,
            "hidden_size": 16,
            "mlp_ratio": 2.0,
            "num_heads": 2,
            "depth": 3,
            "axes_dim": [4, 4],
        },
        hidden_states=_IMAGE,
        timestep=_SHARE,
        encoder_hidden_states=floats(2, 5, 8),
    ),
    "PriorTransformer": _denoiser(
        {**_HEADS, "embedding_dim": 8, "num_embeddings": 5, "additional_embeddings": 4},
        hidden_states=floats(2, 8),
        timestep=_TIME,
        proj_embedding=floats(2, 8),
        encoder_hidden_states=floats(2, 5, 8),
    ),
    "Kandinsky5Transformer3DModel": _denoiser(
        {
            "in_text_dim": 8,
            "in_text_dim2": 8,
            "time_dim": 8,
            "model_dim": 16,
            "ff_dim": 24,
            "num_text_blocks": 2,
            "num_visual_blocks": 3,
            "axes_dims": (4, 2, 2),
        },
        hidden_states=floats(2, 1, 8, 8, 4),
        encoder_hidden_states=floats(2, 5, 8),
        timestep=_SHARE,
        pooled_projections=floats(2, 8),
        visual_rope_pos=several(*[given(torch.arange(num)) for num in (1, 4, 4)]),
        text_rope_pos=given(torch.arange(5)),
    ),
    "Transformer2DModel": _denoiser(
        {**_HEADS, "in_channels": 8, "norm_num_groups": 4, "cross_attention_dim": 8},
        hidden_states=floats(2, 8, 4, 4),
        encoder_hidden_states=floats(2, 5, 8),
    ),
    "UNet2DModel": _denoiser(
        {
            **_UNET,
            "attention_head_dim": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        sample=floats(2, 3, 8, 8),
        timestep=_TIME,
    ),
    "UNet2DConditionModel": _denoiser(
        {
            **_UNET,
            "attention_head_dim": 4,
            "cross_attention_dim": 8,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": 2,
        },
        sample=_IMAGE,
        timestep=_TIME,
        encoder_hidden_states=floats(2, 5, 8),
    ),
    "UNet3DConditionModel": _denoiser(
        {
            **_UNET,
            "attention_head_dim": 4,
            "cross_attention_dim": 8,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        sample=floats(2, 4, 2, 8, 8),
        timestep=_TIME,
        encoder_hidden_states=floats(2, 5, 8),
    ),
}
