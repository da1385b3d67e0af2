"""What must be kept from torch and transformers while a model runs on fake tensors, and what need
not run at all.

Owns four contexts, and the stand-in for a block that looks like one traced before. Used by
`trace_model`.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lohan.errors import ConfigError, LohanError


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from printing an error that is raised, and explained, all the same."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


@contextmanager
def as_if_real() -> Iterator[None]:
    """Keep transformers from treating fake tensors as a compilation.

    It would then build every causal mask in full, because a compiled graph must hold for any
    input, where a real run finds that no mask is needed.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    is_tracing = getattr(masks, "is_tracing", None)
    if is_tracing is None:
        yield
        return
    masks.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        masks.is_tracing = is_tracing


@contextmanager
def explained(model: nn.Module, stopped_in: Callable[[], str]) -> Iterator[None]:
    """Say in which part of the model a trace has failed, and why."""
    try:
        yield
    except LohanError:
        raise
    except Exception as error:
        where = stopped_in() or "the model's own forward"
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else "no message"
        raise ConfigError(
            f"{type(model).__name__} could not be traced; it stopped in {where}",
            why=f"{type(error).__name__}: {reason}",
            remedy="pass a batch that its forward accepts; a forward that branches on the values "
            "of tensors cannot be traced without computing them",
        ) from error


class FlashAttention(TorchFunctionMode):
    """Lets attention keep its fused kernel where this device's would refuse dropout.

    Such kernels make the dropout mask again from a seed: bytes and FLOPs are the same without it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def repetition(inputs: Any, result: Any) -> Callable[[list[Any]], Any] | None:
    """Return how to make a block's result from its inputs without running it, if one can.

    Each floating output is replaced by the input that looks like it, so that gradients still flow.
    """
    leaves, structure = tree_flatten(result)
    entering = tree_leaves(inputs)
    sources: list[int | None] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            sources.append(None)
            continue
        alike = [
            place
            for place, tensor in enumerate(entering)
            if isinstance(tensor, torch.Tensor)
            and tensor.shape == leaf.shape
            and tensor.dtype == leaf.dtype
            and tensor.requires_grad == leaf.requires_grad
        ]
        if not alike:
            return None
        sources.append(alike[0])

    def repeat(given: list[Any]) -> Any:
        stand_ins = [
            leaf if source is None else given[source]
            for leaf, source in zip(leaves, sources, strict=True)
        ]
        return tree_unflatten(stand_ins, structure)

    return repeat
