"""Diffusers' denoisers of films, tiny: settings and inputs by class."""

from typing import Any

import torch

from support.sweep.denoisers import Denoiser, Make, denoiser, floats, given, ones, several, whole

_TIME = whole(1000, 2)
_SHARE = floats(2)
_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}
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

VIDEO_DENOISERS: dict[str, Denoiser] = {
    "WanTransformer3DModel": denoiser(_WAN, **_WAN_INPUTS),
    "WanVACETransformer3DModel": denoiser(
        {**_WAN, "vace_layers": [0, 2], "vace_in_channels": 6},
        **_WAN_INPUTS,
        control_hidden_states=floats(2, 6, 2, 4, 4),
    ),
    "SkyReelsV2Transformer3DModel": denoiser(_WAN, **_WAN_INPUTS),
    "ChronoEditTransformer3DModel": denoiser({**_WAN, "rope_temporal_skip_len": 2}, **_WAN_INPUTS),
    "AnyFlowTransformer3DModel": denoiser(
        _WAN,
        **{**_WAN_INPUTS, "hidden_states": floats(2, 2, 4, 4, 4), "timestep": floats(2, 2)},
        r_timestep=floats(2, 2),
    ),
    "MochiTransformer3DModel": denoiser(
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
    "HunyuanVideoTransformer3DModel": denoiser(
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
    "HunyuanVideo15Transformer3DModel": denoiser(
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
    "CogVideoXTransformer3DModel": denoiser(_COG, **_COG_INPUTS),
    "ConsisIDTransformer3DModel": denoiser(
        {**_COG, "cross_attn_dim_head": 8, "cross_attn_num_heads": 2}, **_COG_INPUTS
    ),
    "AllegroTransformer3DModel": denoiser(
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
    "CosmosTransformer3DModel": denoiser(
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
    "LTXVideoTransformer3DModel": denoiser(
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
    "LatteTransformer3DModel": denoiser(
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
    "SanaVideoTransformer3DModel": denoiser(
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
    "Kandinsky5Transformer3DModel": denoiser(
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
    "UNet3DConditionModel": denoiser(
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
