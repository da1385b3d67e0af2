"""Rehearsals that leave no trace: what is called only to learn sizes or draws is undone.

Owns what of a trainer is put back after a loss whose result is thrown away, and which collators may
be called for a batch nobody trains on. Used by the trainer.
"""

import collections
import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lohan.model.tracing.trace_ops import tensors_in
from lohan.train.run.randomness_state import random_state, set_random_state

_LIBRARIES = ("transformers.", "trl.")


def may_rehearse(collator: Any) -> bool:
    """Whether calling a copy of it leaves no trace. Of a user's own that is not known."""
    kind = collator if hasattr(collator, "__qualname__") else type(collator)
    return str(getattr(kind, "__module__", "")).startswith(_LIBRARIES)


def collated_without_trace(collator: Any, rows: list[dict[str, Any]]) -> Any:
    """A batch nobody trains on: collators draw masks, from global generators or their own."""
    before = random_state()
    try:
        return copy.deepcopy(collator)(rows)
    finally:
        set_random_state(before)


@contextlib.contextmanager
def without_trace(trainer: Any) -> Iterator[None]:
    """Within it, a trainer may compute a loss: attributes and their containers (metrics, counters)
    are put back, and a user's own loss function is not called."""
    attributes = dict(vars(trainer))
    contents: dict[int, tuple[Any, Any]] = {}
    _note_contents(attributes, contents)
    if trainer.compute_loss_func is not None:
        trainer.compute_loss_func = _any_loss
    try:
        yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(attributes)
        for found, before in contents.values():
            _put_back(found, before)


def _any_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    given = dict(outputs) if isinstance(outputs, Mapping) else outputs
    return next(one for one in tensors_in(given) if one.is_floating_point()).float().mean()


def _note_contents(found: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Copies of all containers in reach, and of the numbers in tensors, each without what it
    holds."""
    if id(found) in contents:
        return
    if type(found) is torch.Tensor and not found.is_meta and not found.requires_grad:
        contents[id(found)] = (found, found.clone())
    elif isinstance(found, dict | list | set | collections.deque):
        contents[id(found)] = (found, copy.copy(found))
        for one in found.values() if isinstance(found, dict) else found:
            _note_contents(one, contents)


def _put_back(found: Any, before: Any) -> None:
    if isinstance(found, torch.Tensor):
        if not torch.equal(found, before):
            found.copy_(before)
        return
    found.clear()
    if isinstance(found, list | collections.deque):
        found.extend(before)
    else:
        found.update(before)
