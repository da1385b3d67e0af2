"""What to call a model's forward with, for any batch and sequence length, on fake tensors.

Owns the guess for models that take `input_ids` and for known diffusion transformers. Values do not
matter, only shapes and dtypes. Imports torch; called by `configs`.
"""

import contextlib
import inspect
from typing import Any

import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.model.paper_models import Dit
from lohan.model.tracing.trace_model import MakeInputs

# Lengths of text conditions where a configuration does not say: CLIP with T5, or T5 alone.
_TEXT_TOKENS = {
    "SD3Transformer2DModel": 333,
    "FluxTransformer2DModel": 512,
    "WanTransformer3DModel": 512,
}
_OTHER_TEXT_TOKENS = 300
# A diffusion model over packed latents: 1024x1024 images make 64x64 tokens.
_PACKED_SIZE = (64, 64)
_PACKED_TOKENS = 64 * 64
# Latent frames, rows and columns of a video of 81 frames with 832x480 pixels.
_VIDEO_LATENTS = (21, 60, 104)


def inputs_for(model: nn.Module, dtype: torch.dtype) -> tuple[MakeInputs, bool]:
    """Return how to make a model's inputs, and whether its sequence length is fixed.

    Args:
        model: whose forward is to be called.
        dtype: of floating inputs.

    Raises:
        ConfigError: if the forward is not one that is understood.
    """
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        model = model.get_base_model()  # type: ignore[operator] # PEFT's hands all on to it
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" in accepted:
        return _language(model, accepted), False
    settings = getattr(model, "config", None)
    if "hidden_states" in accepted and "timestep" in accepted and settings is not None:
        return _diffusion(model, accepted, dict(settings), dtype), True
    if isinstance(model, Dit):
        return _paper_dit(model, dtype), True
    raise ConfigError(
        f"it is not known what to call {type(model).__name__} with",
        why=f"its forward takes {', '.join(accepted) or 'nothing'}, not input_ids",
        remedy="attach the module with a batch of its own: lohan.attach(..., example=...)",
    )


def is_known(model: nn.Module) -> bool:
    """Whether `inputs_for` knows what to call a model with."""
    with contextlib.suppress(ConfigError):
        inputs_for(model, torch.bfloat16)
        return True
    return False


def _language(model: nn.Module, accepted: Any) -> MakeInputs:
    has_rest = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    is_per_sequence = type(model).__name__.endswith("ForSequenceClassification")

    def make(batch: int, sequence: int) -> dict[str, Any]:
        made: dict[str, Any] = {"input_ids": torch.zeros(batch, sequence, dtype=torch.long)}
        if "labels" in accepted:
            size = (batch,) if is_per_sequence else (batch, sequence)
            made["labels"] = torch.zeros(size, dtype=torch.long)
        elif "decoder_input_ids" in accepted:
            made["decoder_input_ids"] = torch.zeros(batch, sequence, dtype=torch.long)
        if "use_cache" in accepted or (has_rest and hasattr(model, "config")):
            made["use_cache"] = False  # A cache of keys and values is for generating.
        return made

    return make


def _paper_dit(model: Dit, dtype: torch.dtype) -> MakeInputs:
    latent, channels = model.latent, model.channels
    num_tokens, patch_elements = model.positions.shape[1], model.head.linear.out_features

    def make(batch: int, sequence: int) -> dict[str, Any]:
        return {
            "latents": torch.zeros(batch, channels, latent, latent, dtype=dtype),
            "timestep": torch.zeros(batch, dtype=torch.long),
            "labels": torch.zeros(batch, dtype=torch.long),
            "noise": torch.zeros(batch, num_tokens, patch_elements),
        }

    return make


def _diffusion(
    model: nn.Module, accepted: Any, settings: dict[str, Any], dtype: torch.dtype
) -> MakeInputs:
    kind = type(model).__name__
    num_text = _TEXT_TOKENS.get(kind, _OTHER_TEXT_TOKENS)
    text_width = (
        settings.get("joint_attention_dim")
        or settings.get("caption_channels")
        or settings.get("cross_attention_dim")
        or settings.get("text_dim")
    )
    size, channels = settings.get("sample_size"), settings.get("in_channels")
    if channels is None:
        raise ConfigError(
            f"the configuration of {kind} has no in_channels",
            why="the size of its input is not known",
            remedy="add it to the configuration",
        )

    def make(batch: int, sequence: int) -> dict[str, Any]:
        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(batch, *shape, dtype=dtype)

        if isinstance(settings.get("patch_size"), tuple | list):
            latents = floats(channels, *_VIDEO_LATENTS)
        elif size is None:
            latents = floats(_PACKED_TOKENS, channels)
        else:
            latents = floats(channels, size, size)
        made: dict[str, Any] = {
            "hidden_states": latents,
            "timestep": torch.zeros(batch, dtype=torch.long),
            "return_dict": False,
        }
        if "encoder_hidden_states" in accepted and text_width:
            made["encoder_hidden_states"] = floats(num_text, text_width)
        if "pooled_projections" in accepted:
            made["pooled_projections"] = floats(settings["pooled_projection_dim"])
        if "class_labels" in accepted:
            made["class_labels"] = torch.zeros(batch, dtype=torch.long)
        if "added_cond_kwargs" in accepted:
            has_sizes = settings.get("use_additional_conditions") or size == 128
            sizes = {"resolution": floats(2), "aspect_ratio": floats(1)}
            none = {"resolution": None, "aspect_ratio": None}
            made["added_cond_kwargs"] = sizes if has_sizes else none
        if "img_shapes" in accepted:
            made["img_shapes"] = [[(1, *_PACKED_SIZE)]] * batch
            made["timestep"] = floats()
        if "img_ids" in accepted:
            made["img_ids"] = torch.zeros(_PACKED_TOKENS, 3, dtype=dtype)
            made["txt_ids"] = torch.zeros(num_text, 3, dtype=dtype)
            made["timestep"] = floats()
            if settings.get("guidance_embeds"):
                made["guidance"] = floats()
        return made

    return make
