"""Tensors that leave a block: cut off from its graph, not to be changed behind autograd's back, and
not to carry hooks across several parts of the model.

Owns the cut behind a block (`leave_block`) and watching for hooks on tensors at cuts (`HookWatch`).
Called by `block_run`, and by `passes` between the parts of a micro-batch.
"""

import weakref
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from lohan.drive.edges.cuts import Edge, edge_of, is_exit, leave
from lohan.drive.weights.parameter_views import Weights
from lohan.errors import ConfigError
from lohan.model.tracing.trace_ops import storage_key, tensors_in


def leave_block(
    leaves: Sequence[Any],
    with_gradient: Sequence[bool],
    originals: Mapping[int, torch.Tensor],
    weights: Weights | None,
    stored: Container[int] = (),
) -> tuple[list[Any], list[Edge | None], list[torch.Tensor]]:
    """Outputs for the model, cut off from the block's graph, and the edges of their gradients; and
    those with gradients that share memory.

    Args:
        with_gradient: whether each leaf has one.
        originals: by identity, the model's own names for tensors that the block was given.
        weights: of the model; None if no leaf can be a view of one.
        stored: places of leaves whose memory waits for the backward.
    """
    left: dict[int, torch.Tensor] = {}
    edges: dict[int, Edge | None] = {}
    for place, (leaf, has_gradient) in enumerate(zip(leaves, with_gradient, strict=True)):
        if not isinstance(leaf, torch.Tensor) or id(leaf) in left:
            continue
        if id(leaf) in originals:
            # Handed through: plain autograd would know it under one name, so it keeps that.
            left[id(leaf)], edges[id(leaf)] = originals[id(leaf)], None
            continue
        value = leaf.detach()
        if place in stored:
            value = value.clone()  # the model may change its copy in place, not this one
        elif weights is not None and (own := weights.place_of(value)) is not None:
            value = own.copy()  # the weights are about to leave
        left[id(leaf)] = leave(value) if has_gradient else value
        edges[id(leaf)] = edge_of(left[id(leaf)]) if has_gradient else None
    # An output that is there twice has one sum of gradients, taken once.
    exits: list[Edge | None] = []
    for leaf in leaves:
        edge = edges.get(id(leaf))
        exits.append(edge if edge not in exits else None)
    outputs = [left.get(id(leaf), leaf) for leaf in leaves]
    return outputs, exits, _sharing([left[key] for key, edge in edges.items() if edge is not None])


def _sharing(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if len(tensors) < 2:
        return []
    users = Counter(map(storage_key, tensors))
    return [one for one in tensors if users[storage_key(one)] > 1]


def refuse_changed_alias(tensor: torch.Tensor, what: str) -> None:
    """Raise if an output was changed in place under autograd, and another one with it, whose
    gradient would not know."""
    if not is_exit(edge_of(tensor)[0]):
        raise ConfigError(
            f"an output of {what} of shape {tuple(tensor.shape)} was changed in place, and shares "
            "its memory with another output",
            why="both are cut off from the block, so autograd does not see that the other one "
            "changes with it",
            remedy="write `x = x * y` instead of `x *= y` for outputs of blocks",
        )


class HookWatch:
    """Tensors at the cuts of one micro-batch that the model may put hooks on."""

    def __init__(self) -> None:
        self._alive: list[weakref.ref[torch.Tensor]] = []
        self.hooked: set[Edge] = set()
        """Where tensors with hooks are made that entered blocks."""

    def add(self, entered: Iterable[torch.Tensor], left: Any) -> None:
        """A block was given these tensors, and has returned what it did."""
        returned = [left] if isinstance(left, torch.Tensor) else tensors_in(left)
        self._alive += [
            weakref.ref(one) for one in (*entered, *returned) if one.grad_fn is not None
        ]

    def look(self) -> None:
        """The model has come to its next block: what it still holds it may use in other parts.

        Raises:
            ConfigError: an output of a block has a hook, and would run it on parts of a sum.
        """
        self._alive = [one for one in self._alive if one() is not None]
        for reference in self._alive:
            tensor = reference()
            if tensor is None or not tensor._backward_hooks:
                continue
            edge = edge_of(tensor)
            if is_exit(edge[0]):
                raise ConfigError(
                    f"an output of a block of shape {tuple(tensor.shape)} has a hook on its "
                    "gradient, and is used by another block or later",
                    why="its gradient is summed up part by part, and the hook is for the whole",
                    remedy="put the hook on a tensor made from it: `y = x.view_as(x)`, and go on "
                    "with that one",
                )
            self.hooked.add(edge)
