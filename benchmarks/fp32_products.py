"""Matrix products of bf16 tensors through fp32, for processors without bf16 instructions.

There torch computes them element by element, some fifty times slower than in fp32, and a step is
nothing else. Weights, activations and gradients stay bf16 and every system does the same work; what
a product costs is then near what it does on a processor of these days. Used by `train_cpu.py`.
"""

from typing import Any

import torch
from torch.nn import functional


class _Linear(torch.autograd.Function):
    """`x @ weight.T`, rounded to bf16 once; saves what the plain one saves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _PLAIN_LINEAR(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].float()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight.float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = gradient.flatten(0, -2).T @ x.float().flatten(0, -2)
            of_weight = of_weight.to(weight.dtype)
        return of_x, of_weight


_PLAIN_LINEAR = functional.linear
_PLAIN_ATTENTION = functional.scaled_dot_product_attention


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    if x.dtype is not torch.bfloat16 or bias is not None:
        return _PLAIN_LINEAR(x, weight, bias)
    return _Linear.apply(x, weight)


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    if query.dtype is not torch.bfloat16:
        return _PLAIN_ATTENTION(query, key, value, *args, **kwargs)
    wide = (tensor.float() for tensor in (query, key, value))
    return _PLAIN_ATTENTION(*wide, *args, **kwargs).to(query.dtype)


def compute_in_fp32() -> None:
    """For the rest of this process."""
    functional.linear = _linear
    functional.scaled_dot_product_attention = _attention
