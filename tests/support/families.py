"""Tiny models of families with habits of their own, and losses on everything they give out.

A loss weighs hidden states and router logits too: what a model collects while it runs is then part
of the gradient, and one state too many is a wrong one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers

from support.tiny_models import VOCABULARY, tokens_of

NUM_LAYERS = 4

Batch = dict[str, Any]

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
"""The output of a tied embedding cannot be part of the loss as it is."""
_IMAGE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build a model, make a batch for it, and what to train it on."""

    build: Callable[[], torch.nn.Module]
    batch: Callable[[int], Batch]
    loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor]


def collected_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss, and all it collects: every hidden state with a weight of its own."""
    output = model(**batch, output_hidden_states=True)
    found = [output[key].float().mean() for key in ("loss", "image_embeds") if key in output]
    found += [_weighed(part) for part in _parts(output, "hidden_states")]
    found += [_weighed(part) for part in _parts(output, "router_logits")]
    return torch.stack(found).sum()


def _parts(output: Any, name: str) -> list[tuple[torch.Tensor, ...]]:
    """Of an encoder and a decoder all but the first: what a shared embedding gives cannot be part
    of the loss as it is."""
    pairs = [output.get(f"{side}_{name}") for side in ("encoder", "decoder")]
    found = [states[1:] for states in pairs if states is not None]
    return found if output.get(name) is None else [output[name], *found]


def _weighed(states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    # Their number counts as well: of each state a share, and later ones less.
    shares = [one.float().pow(2).mean() / (2 + index) for index, one in enumerate(states)]
    return torch.stack(shares).sum() / len(shares)


def _predicted(call: Callable[[torch.nn.Module, Batch], torch.Tensor]) -> Any:
    def loss_fn(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        predicted = call(model, batch)
        return torch.nn.functional.mse_loss(predicted.float(), batch["noise"].float())

    return loss_fn


def _causal(seed: int) -> Batch:
    tokens = tokens_of(seed)
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def _masked(seed: int) -> Batch:
    batch = _causal(seed)
    generator = torch.Generator().manual_seed(seed)
    is_hidden = torch.rand(batch["labels"].shape, generator=generator) < 0.3
    is_hidden[1, 0] = True
    return {**batch, "labels": batch["labels"].masked_fill(~is_hidden, -100)}


def _pairs(seed: int) -> Batch:
    return {"input_ids": tokens_of(seed), "labels": tokens_of(seed + 500, (2, 5))}


def _noise(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def _pictures(seed: int) -> Batch:
    return {"pixel_values": _noise(seed, 2, 3, 8, 8)}


def _labelled_pictures(seed: int) -> Batch:
    return {**_pictures(seed), "labels": tokens_of(seed)[:, 0] % 3}


def _llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TEXT, num_key_value_heads=2))


def _gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=NUM_LAYERS, n_head=2, n_positions=32, **_UNTIED
    )
    return transformers.GPT2LMHeadModel(config)


def _qwen3_moe() -> torch.nn.Module:
    config = transformers.Qwen3MoeConfig(
        **_TEXT,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _bert() -> torch.nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_TEXT, **_UNTIED))


def _t5() -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=NUM_LAYERS,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _clip() -> torch.nn.Module:
    config = transformers.CLIPVisionConfig(**_IMAGE, projection_dim=16)
    return transformers.CLIPVisionModelWithProjection(config)


def _siglip() -> torch.nn.Module:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_IMAGE))


def _vit() -> torch.nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**_IMAGE, num_labels=3))


def _z_image() -> torch.nn.Module:
    return diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=16,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=8,
        axes_dims=[4, 2, 2],
        axes_lens=[64, 16, 16],
    )


def _z_image_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": _noise(seed, 2, 4, 1, 4, 4),
        "t": torch.rand(2, generator=generator).to(torch.bfloat16),
        "cap_feats": _noise(seed + 1, 2, 5, 8),
        "noise": _noise(seed + 2, 2, 4, 1, 4, 4),
    }


def _call_z_image(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    found = model(list(batch["x"]), batch["t"], list(batch["cap_feats"]), return_dict=False)
    return torch.stack(found[0])


def _flux() -> torch.nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        guidance_embeds=True,
        axes_dims_rope=(4, 2, 2),
    )


def _flux_batch(seed: int) -> Batch:
    return {
        "hidden_states": _noise(seed, 2, 6, 4),
        "encoder_hidden_states": _noise(seed + 1, 2, 5, 8),
        "pooled_projections": _noise(seed + 2, 2, 8),
        "timestep": _noise(seed + 3, 2),
        "guidance": _noise(seed + 4, 2),
        "noise": _noise(seed + 5, 2, 6, 4),
    }


def _call_flux(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "noise"}
    places = {"img_ids": torch.arange(18).view(6, 3), "txt_ids": torch.zeros(5, 3)}
    output: torch.Tensor = model(**inputs, **places, return_dict=False)[0]
    return output


def _sd3() -> torch.nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
    )


def _sd3_batch(seed: int) -> Batch:
    return {
        "hidden_states": _noise(seed, 2, 4, 8, 8),
        "encoder_hidden_states": _noise(seed + 1, 2, 5, 8),
        "pooled_projections": _noise(seed + 2, 2, 8),
        "timestep": tokens_of(seed)[:, 0],
        "noise": _noise(seed + 3, 2, 4, 8, 8),
    }


def _wan() -> torch.nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=16,
        num_layers=3,
        rope_max_seq_len=16,
    )


def _wan_batch(seed: int) -> Batch:
    return {
        "hidden_states": _noise(seed, 2, 4, 2, 4, 4),
        "encoder_hidden_states": _noise(seed + 1, 2, 5, 8),
        "timestep": tokens_of(seed)[:, 0],
        "noise": _noise(seed + 3, 2, 4, 2, 4, 4),
    }


def _call_by_name(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "noise"}
    output: torch.Tensor = model(**inputs, return_dict=False)[0]
    return output


FAMILIES = {
    "llama": Family(build=_llama, batch=_causal, loss_fn=collected_loss),
    "gpt2": Family(build=_gpt2, batch=_causal, loss_fn=collected_loss),
    "qwen3-moe": Family(build=_qwen3_moe, batch=_causal, loss_fn=collected_loss),
    "bert": Family(build=_bert, batch=_masked, loss_fn=collected_loss),
    "t5": Family(build=_t5, batch=_pairs, loss_fn=collected_loss),
    "clip": Family(build=_clip, batch=_pictures, loss_fn=collected_loss),
    "siglip": Family(build=_siglip, batch=_pictures, loss_fn=collected_loss),
    "vit": Family(build=_vit, batch=_labelled_pictures, loss_fn=collected_loss),
    "z-image": Family(build=_z_image, batch=_z_image_batch, loss_fn=_predicted(_call_z_image)),
    "flux": Family(build=_flux, batch=_flux_batch, loss_fn=_predicted(_call_flux)),
    "sd3": Family(build=_sd3, batch=_sd3_batch, loss_fn=_predicted(_call_by_name)),
    "wan": Family(build=_wan, batch=_wan_batch, loss_fn=_predicted(_call_by_name)),
}
