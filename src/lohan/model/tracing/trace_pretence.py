"""What must be kept from torch and transformers while a model runs on fake tensors.

Owns four contexts; used by `trace_model`.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

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
            remedy="pass inputs= that its forward accepts; a forward that branches on the values "
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
