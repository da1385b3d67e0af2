"""What must be kept from torch and transformers while a model runs on fake tensors.

Owns two contexts; used by `trace_model`.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
