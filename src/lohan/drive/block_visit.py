"""What a block was called with, and what is kept of its forward until its backward.

Owns the data of a visit and the checks on it between the two. Made by `block_run`, and `passes`
holds on to it; `micro_batch` makes the call.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from lohan.drive.activations.store import ActivationKey
from lohan.drive.captured.graphs import Graph, Trust
from lohan.drive.edges.cuts import Edge
from lohan.drive.edges.entries import refuse_changed, refuse_changed_objects
from lohan.drive.edges.exits import refuse_changed_alias
from lohan.drive.surroundings.ambient import Ambient
from lohan.drive.surroundings.randomness import RandomState
from lohan.drive.watch.contract import Changes, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """A block as the model called it."""

    forward: Callable[..., Any]
    """The module's own forward."""
    leaves: list[Any]
    """Of its arguments."""
    spec: TreeSpec
    ambient: Ambient
    settings: Hashable = None
    """What its code may read besides its arguments, as the micro-batch has it."""
    why_not: str | None = None
    """Why it cannot be captured, if that can be seen."""


@dataclass(slots=True, kw_only=True)
class BlockVisit:
    """What is kept of the forward of one block and micro-batch."""

    forward: Callable[..., Any]
    ambient: Ambient
    leaves: list[Any]
    """Arguments; an `Entry` stands for each tensor."""
    spec: TreeSpec
    exits: list[Edge | None]
    """For each output leaf where its gradient waits; None for those without one."""
    random_state: RandomState | None
    """State before the forward, if it drew random numbers."""
    changes: Changes = field(default_factory=Changes)
    """Buffers and attributes of its own that the forward changed."""
    objects: Snapshot | None = None
    """Arguments that are neither tensors nor plain values."""
    entered: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Input tensors and their versions, until the next boundary; then `forget_inputs`."""

    sharing: list[torch.Tensor] = field(default_factory=list)
    """Outputs with gradients whose memory is that of others; until then, too."""

    key: Hashable | None = None
    """How the block was called, if it may be captured."""
    trust: Trust | None = None
    """What is known of it called so."""
    graph: Graph | None = None
    """What ran it, if that was not its own code."""
    stored: frozenset[int] = frozenset()
    keys: dict[int, ActivationKey] = field(default_factory=dict)
    """Of what the graph has stored, by its place in the cut."""
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    """What it has stored and stays where it is."""
    states: dict[int, RandomState] = field(default_factory=dict)
    """Of the generators, before random calls of the graph."""

    @property
    def may_have_drawn(self) -> bool:
        """Whether the forward may have moved the random generators."""
        return self.graph is None or self.graph.draws

    def forget_inputs(self, what: str) -> None:
        """Check that what the store was given is still what the block saw, and let go of it."""
        for tensor, version in self.entered:
            refuse_changed(tensor, version, what)
        for tensor in self.sharing:
            refuse_changed_alias(tensor, what)
        self.entered.clear()
        self.sharing.clear()

    def refuse_other_objects(self, what: str) -> None:
        """Check that a re-run will find the objects that the forward was given, as they were."""
        if self.objects is not None:
            refuse_changed_objects(self.objects, what)


@dataclass(slots=True)
class Entered:
    """A tensor that the block was given, back from the store."""

    value: torch.Tensor
    edge: Edge | None
    so_far: torch.Tensor | None
