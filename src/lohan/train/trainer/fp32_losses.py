"""Losses in fp32 for a model whose weights compute in 16 bits: what `bf16=True` means.

Owns the part of mixed precision that is not about weights: loss functions that a model calls get
fp32 tensors, and what leaves the model is fp32. transformers has both by autocast and accelerate;
autocast would also add roundings inside of blocks. Used by the trainers.
"""

import threading
from typing import Any

import torch
from accelerate.utils import convert_to_fp32  # type: ignore[import-untyped]
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LOSS_FUNCTIONS = frozenset(
    getattr(functional, name)
    for name in (
        *("cross_entropy", "nll_loss", "ctc_loss", "kl_div", "gaussian_nll_loss"),
        *("poisson_nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_embedding_loss"),
        *("hinge_embedding_loss", "margin_ranking_loss", "multi_margin_loss"),
        *("multilabel_margin_loss", "multilabel_soft_margin_loss", "soft_margin_loss"),
        *("triplet_margin_loss", "triplet_margin_with_distance_loss"),
    )
)
_inside = threading.local()  # each micro-batch has a thread


def compute_losses_in_fp32(model: torch.nn.Module) -> None:
    """Have a model compute its losses, and return its outputs, in fp32.

    By hooks, which the trace that is planned with runs too.
    """
    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)


class _LossesInFp32(TorchFunctionMode):
    """Widens what loss functions are given. Losses that widen it themselves keep their bits."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOSS_FUNCTIONS:
            args, kwargs = tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(leaf: Any) -> Any:
    is_narrow = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
    return leaf.float() if is_narrow else leaf


def _enter(module: torch.nn.Module, args: Any) -> None:
    mode: Any = _LossesInFp32()
    mode.__enter__()
    _inside.modes = [*getattr(_inside, "modes", ()), mode]


def _leave(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """Called after a failed forward too."""
    *_inside.modes, mode = _inside.modes
    mode.__exit__(None, None, None)
    return convert_to_fp32(output)
