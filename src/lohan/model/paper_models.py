"""The paper's models as small modules: GPTs of GPT-3's make, and diffusion transformers (DiT).

Owns their structure only; sizes are in `names`. Plain torch, so that they can be traced on fake
tensors and run for real by tests and examples. Imports torch.
Letters: b batch, s sequence, n heads, d width of a head, h hidden width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Multi-head self-attention with one projection for q, k and v; no score matrix in memory."""

    def __init__(self, hidden: int, num_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each sequence."""
        b, s, h = x.shape
        qkv = self.qkv(x).view(b, s, 3, self.num_heads, h // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(b, s, h))
        return projected


class Mlp(nn.Module):
    """Two projections, four times as wide in between, with GELU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, 4 * hidden)
        self.fc2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to every token."""
        out: Tensor = self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
        return out


class GptBlock(nn.Module):
    """Norm, attention, norm, MLP; each half added to what came in."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, num_heads, is_causal=True)
        self.ln2 = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the same shape."""
        x = x + self.attention(self.ln1(x))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out


class Gpt(nn.Module):
    """A GPT with learned positions, biases everywhere and the head tied to the embedding."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        hidden: int,
        vocabulary: int = 50257,
        longest_sequence: int = 1024,
    ) -> None:
        super().__init__()
        self.longest_sequence = longest_sequence
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(longest_sequence, hidden)
        self.blocks = nn.ModuleList(GptBlock(hidden, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of predicting each label from the tokens up to its place."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Shift and scale every token of a sample by what the condition says."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DitBlock(nn.Module):
    """A transformer block whose norms and branches are set by the condition (adaLN-Zero)."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.attention = Attention(hidden, num_heads, is_causal=False)
        self.norm2 = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return tokens of the same shape."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attention(modulate(self.norm1(x), shift1, scale1))
        out: Tensor = x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return out


class TimestepEmbedding(nn.Module):
    """A diffusion time as sines and cosines, then two projections."""

    def __init__(self, hidden: int, num_frequencies: int = 256) -> None:
        super().__init__()
        self.num_frequencies = num_frequencies
        self.fc1 = nn.Linear(num_frequencies, hidden)
        self.fc2 = nn.Linear(hidden, hidden)

    def forward(self, timestep: Tensor) -> Tensor:
        """Return one vector per sample."""
        half = self.num_frequencies // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=timestep.device) / half)
        angles = timestep[:, None].float() * rates[None]
        waves = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
        out: Tensor = self.fc2(functional.silu(self.fc1(waves.to(self.fc1.weight.dtype))))
        return out


class DitHead(nn.Module):
    """The last norm, set by the condition, and the projection back to patches."""

    def __init__(self, hidden: int, patch_elements: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden, patch_elements)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return one patch per token."""
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        patches: Tensor = self.linear(modulate(self.norm(x), shift, scale))
        return patches


class Dit(nn.Module):
    """A diffusion transformer over latents: patches of 2x2, fixed positions, class labels.

    512x512 images are 64x64 latents of 4 channels: 1024 tokens. As in DiT-XL/2 the head predicts
    the noise and its variance (8 channels), and one class stands for no label.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        hidden: int,
        latent: int = 64,
        channels: int = 4,
        patch: int = 2,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.latent, self.channels = latent, channels
        self.patches = nn.Conv2d(channels, hidden, kernel_size=patch, stride=patch)
        # Positions are sines and cosines, not trained: a parameter without a gradient in DiT.
        places = torch.zeros(1, (latent // patch) ** 2, hidden)
        self.positions = nn.Parameter(places, requires_grad=False)
        self.timestep = TimestepEmbedding(hidden)
        self.classes = nn.Embedding(num_classes + 1, hidden)
        self.blocks = nn.ModuleList(DitBlock(hidden, num_heads) for _ in range(num_layers))
        self.head = DitHead(hidden, patch * patch * 2 * channels)

    def forward(self, latents: Tensor, timestep: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of the predicted noise, given as one patch per token."""
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        condition = self.timestep(timestep) + self.classes(labels)
        for block in self.blocks:
            x = block(x, condition)
        return functional.mse_loss(self.head(x, condition).float(), noise)
