"""How fast the device computes: a real transformer block, forward and backward, in bf16.

Owns the block, its FLOPs and the choice of its size: as large as it takes for one pass to last a
noticeable time, within the memory of the device. Also times the device's own memory, and how fast
the host launches operators. Called by `machine.py`. Letters: t tokens, w width of the model, f
width of the feed-forward part, h heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.device import Device
from lohan.errors import DoesNotFit, HardwareError
from lohan.measure.figure import Clock, Figure, measure_rounds
from lohan.units import MIB

_HEAD_WIDTH = 64
# Grows until one pass takes long enough: tokens and width.
SIZES: tuple[tuple[int, int], ...] = (
    (256, 512),
    (512, 1024),
    (1024, 2048),
    (2048, 4096),
    (4096, 8192),
)
_SMALLEST_SIZE = (8, 64)
MEMORY_PIECE_BYTES = 128 * MIB


class Block(nn.Module):
    """A block as in Llama: attention and a gated feed-forward part, each after a norm."""

    def __init__(self, width: int, *, device: torch.device) -> None:
        super().__init__()
        # Wide as in Llama: 8/3 of the width, rounded up to whole tiles.
        inner = -(-8 * width // 3 // 128) * 128

        def linear(num_in: int, num_out: int) -> nn.Linear:
            return nn.Linear(num_in, num_out, bias=False, dtype=torch.bfloat16, device=device)

        self.num_heads = max(1, width // _HEAD_WIDTH)
        self.norm_1 = nn.RMSNorm(width, dtype=torch.bfloat16, device=device)
        self.norm_2 = nn.RMSNorm(width, dtype=torch.bfloat16, device=device)
        self.q, self.k, self.v, self.o = (linear(width, width) for _ in range(4))
        self.gate, self.up = (linear(width, inner) for _ in range(2))
        self.down = linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (t, w) to (t, w)."""
        normed = self.norm_1(x)
        q, k, v = (
            part(normed).unflatten(-1, (self.num_heads, -1)).transpose(0, 1).unsqueeze(0)
            for part in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.squeeze(0).transpose(0, 1).flatten(1))
        normed = self.norm_2(x)
        out: torch.Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return out


def flops_of_pass(block: Block, tokens: int) -> int:
    """FLOPs of forward and backward, counted as the planner counts them.

    Products: 2 per weight and token forward, 4 backward. Attention: two products of t x t x w
    forward, five backward; a causal mask does not halve them.
    """
    products = 6 * tokens * sum(p.numel() for p in block.parameters() if p.dim() == 2)
    width: int = block.o.in_features
    return products + 2 * (2 + 5) * tokens * tokens * width


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeFigures:
    """What the device computes, and how it was found out."""

    flops: Figure
    memory: Figure
    """Bytes read and written in the device's own memory."""
    tokens: int
    width: int
    launches: Figure | None = None
    """Operators of a block that the host launches, as eager PyTorch has them."""


def measure_compute(
    device: Device,
    *,
    seconds: float,
    clock: Clock,
    sizes: tuple[tuple[int, int], ...] = SIZES,
    memory_piece_bytes: int = MEMORY_PIECE_BYTES,
) -> ComputeFigures:
    """Run blocks of growing size until one pass takes a third of `seconds`, then time that one.

    Raises:
        DoesNotFit: not even the smallest block has room on the device.
        HardwareError: the device cannot compute in bf16.
    """
    memory = _measure_memory(device, memory_piece_bytes, seconds=seconds / 2, clock=clock)
    chosen = None
    for size in sizes:
        try:
            pass_seconds = _time_pass(device, *size, clock=clock)
        except DoesNotFit:
            if chosen is None:
                raise
            break
        except RuntimeError as error:
            raise HardwareError(
                f"{device.name} failed to compute a transformer block in bf16",
                why=str(error).partition("\n")[0],
                remedy='use another device, such as "cpu"',
            ) from error
        chosen = size
        if pass_seconds >= seconds / 3:
            break
    assert chosen is not None, "there is at least one size"
    # Made anew: while sizes were tried, only the one on trial took memory.
    timed = _pass_of(device, *chosen)
    timed()
    return ComputeFigures(
        flops=measure_rounds(timed, seconds=seconds, clock=clock),
        memory=memory,
        tokens=chosen[0],
        width=chosen[1],
        launches=_measure_launches(device, seconds=seconds / 2, clock=clock),
    )


class _Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


def _measure_launches(device: Device, *, seconds: float, clock: Clock) -> Figure:
    """A block so small that launching it is all there is to do."""
    run = _pass_of(device, *_SMALLEST_SIZE)
    with _Counting() as counting:
        run()

    def launch() -> float:
        run()
        return float(counting.num_operators)

    launch()
    return measure_rounds(launch, seconds=seconds, clock=clock)


def _time_pass(device: Device, tokens: int, width: int, *, clock: Clock) -> float:
    attempt = _pass_of(device, tokens, width)
    attempt()  # the first pass prepares kernels and memory
    started = clock()
    attempt()
    return clock() - started


def _pass_of(device: Device, tokens: int, width: int) -> Callable[[], float]:
    """One forward and backward pass of a block; returns its FLOPs."""
    with device.compute():
        block = Block(width, device=device.torch_device)
        x = torch.randn(tokens, width, device=device.torch_device).to(torch.bfloat16)
    x.requires_grad_()
    num_flops = flops_of_pass(block, tokens)

    def run() -> float:
        with device.compute():
            out = block(x)
            torch.autograd.backward(out, torch.ones_like(out))
            for parameter in block.parameters():
                parameter.grad = None
            x.grad = None
            device.charge(num_flops=num_flops)
        # Every pass, or a slow device would be left with as many as the host can start.
        device.synchronize()
        return num_flops

    return run


def _measure_memory(device: Device, piece_bytes: int, *, seconds: float, clock: Clock) -> Figure:
    if device.memory_bytes is not None:
        piece_bytes = max(min(piece_bytes, device.memory_bytes // 8), MIB)
    with device.compute():
        source = torch.zeros(piece_bytes, dtype=torch.uint8, device=device.torch_device)
        target = torch.zeros_like(source)

    def copy() -> float:
        with device.compute():
            target.copy_(source)
            device.charge(num_bytes=2 * piece_bytes)
        device.synchronize()
        return 2 * piece_bytes

    copy()
    return measure_rounds(copy, seconds=seconds, clock=clock)
