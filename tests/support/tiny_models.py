"""Tiny models of every family the driver must handle, with batches for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers

VOCABULARY = 61


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """How to build a model and a batch, and where its blocks are."""

    build: Callable[[float], torch.nn.Module]
    """Given the dropout probability."""
    batch: Callable[[int, torch.dtype], dict[str, Any]]
    """Given a seed (and so other values) and the type of floating-point inputs."""
    runs: list[list[str]]


def _names(path: str, count: int) -> list[str]:
    return [f"{path}.{index}" for index in range(count)]


def tokens_of(seed: int, shape: tuple[int, int] = (2, 7)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(2, VOCABULARY, shape, generator=generator)


def _causal_batch(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    tokens = tokens_of(seed)
    mask = torch.ones_like(tokens)
    mask[0, -2:] = 0
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }


def _encoder_decoder_batch(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"input_ids": tokens_of(seed), "labels": tokens_of(seed + 500, (2, 5))}


def llama(dropout: float) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=dropout,
    )
    return transformers.LlamaForCausalLM(config)


def lora(dropout: float) -> torch.nn.Module:
    """A frozen base with an adapter in every block."""
    settings = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=dropout, target_modules="all-linear")
    made = peft.get_peft_model(llama(dropout), settings)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # zeros, which would keep the gradients of lora_A away
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def gpt2(dropout: float) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=3,
        n_head=2,
        n_positions=32,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.GPT2LMHeadModel(config)


def qwen3(dropout: float) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        attention_dropout=dropout,
        tie_word_embeddings=True,
    )
    return transformers.Qwen3ForCausalLM(config)


def t5(dropout: float) -> torch.nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        relative_attention_num_buckets=8,
    )
    return transformers.T5ForConditionalGeneration(config)


def bart(dropout: float) -> torch.nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=1,
        forced_eos_token_id=1,
    )
    return transformers.BartForConditionalGeneration(config)


class TinyDiTBlock(torch.nn.Module):
    """Attention and MLP, shifted, scaled and gated by a conditioning vector."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.modulation = torch.nn.Linear(width, 6 * width)
        self.norm1 = torch.nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = torch.nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, *, conditioning: dict[str, torch.Tensor]) -> torch.Tensor:
        modulation = self.modulation(torch.nn.functional.silu(conditioning["c"]))
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation[:, None].chunk(6, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        h = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + gate1 * self.dropout(self.out(h.transpose(1, 2).flatten(2)))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class TinyDiT(torch.nn.Module):
    """A diffusion transformer: the conditioning enters every block and the final layer."""

    def __init__(self, dropout: float, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.patch = torch.nn.Linear(4, width)
        self.position = torch.nn.Parameter(torch.randn(6, width))
        self.time = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.SiLU(), torch.nn.Linear(width, width)
        )
        self.blocks = torch.nn.ModuleList(TinyDiTBlock(width, dropout) for _ in range(depth))
        self.final_modulation = torch.nn.Linear(width, 2 * width)
        self.final = torch.nn.Linear(width, 4)

    def forward(self, pixels: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.patch(pixels) + self.position
        c = self.time(time)
        for block in self.blocks:
            x = block(x, conditioning={"c": c})
        shift, scale = self.final_modulation(c)[:, None].chunk(2, -1)
        return self.final(x * (1 + scale) + shift)


def denoising_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["pixels"], batch["time"]), batch["noise"])


def _dit_batch(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"pixels": (2, 6, 4), "time": (2, 8), "noise": (2, 6, 4)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


TINY_MODELS = {
    "llama": TinyModel(build=llama, batch=_causal_batch, runs=[_names("model.layers", 3)]),
    "lora": TinyModel(
        build=lora, batch=_causal_batch, runs=[_names("base_model.model.model.layers", 3)]
    ),
    "gpt2": TinyModel(build=gpt2, batch=_causal_batch, runs=[_names("transformer.h", 3)]),
    "qwen3": TinyModel(build=qwen3, batch=_causal_batch, runs=[_names("model.layers", 3)]),
    "t5": TinyModel(
        build=t5,
        batch=_encoder_decoder_batch,
        runs=[_names("encoder.block", 2), _names("decoder.block", 3)],
    ),
    "bart": TinyModel(
        build=bart,
        batch=_encoder_decoder_batch,
        runs=[_names("model.encoder.layers", 2), _names("model.decoder.layers", 2)],
    ),
    "dit": TinyModel(build=TinyDiT, batch=_dit_batch, runs=[_names("blocks", 3)]),
}

LOSS_FUNCTIONS = {"dit": denoising_loss}
