"""Losses in fp32 for a model whose weights compute in 16 bits: what `bf16=True` means.

Owns the part of mixed precision that is not about weights: loss functions that a model calls get
fp32 tensors, and what leaves the model is fp32. transformers has both by autocast and accelerate;
autocast would also add roundings inside of blocks. Used by the trainers.
"""

import functools
import inspect
import threading
from typing import Any

import torch
import transformers
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

    By hooks, which the trace that is planned with runs too. A model of one's own may be one block,
    which runs in another thread than its hooks, so there the forward itself is changed as well.
    """
    model.register_forward_pre_hook(_enter)
    model.register_forward_hook(_leave, always_call=True)
    if not isinstance(model, transformers.PreTrainedModel):
        plain: Any = model.forward
        changed: Any = functools.partial(_forward, plain)  # a copy of the model has its own
        changed.__signature__ = inspect.signature(plain)
        model.forward = changed


def narrow_inputs(model: torch.nn.Module) -> None:
    """Have layers whose weights are in 16 bits take fp32 inputs as autocast has them do.

    transformers' models of tokens have none, and are left alone.
    """
    if getattr(model, "main_input_name", "") == "input_ids":
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.modules.conv._ConvNd):
            module.register_forward_pre_hook(_narrow)


def _narrow(module: torch.nn.Module, args: Any) -> Any:
    weight: Any = module.weight
    is_mixed = weight.dtype in (torch.bfloat16, torch.float16)
    return tree_map(
        lambda leaf: leaf.to(weight.dtype) if is_mixed and _is_fp32(leaf) else leaf, args
    )


def _is_fp32(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32


class _LossesInFp32(TorchFunctionMode):
    """Widens what loss functions are given. Losses that widen it themselves keep their bits."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOSS_FUNCTIONS:
            args, kwargs = tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _forward(plain: Any, /, *args: Any, **kwargs: Any) -> Any:
    mode: Any = _LossesInFp32()
    with mode:
        return plain(*args, **kwargs)


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
