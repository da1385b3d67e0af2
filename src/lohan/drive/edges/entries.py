"""Tensors that enter a block: put into the store once, cut off there, and not to be changed.

Owns the arguments of one call (`Arrivals`), what is noted of each tensor for backward (`Entry`) and
which ones a micro-batch has put already (`EntryKeys`). Called by `block_run`.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from lohan.drive.activations.store import (
    ENTRY_ORDINAL,
    SIDE_ORDINAL,
    ActivationKey,
    ActivationStore,
)
from lohan.drive.edges.cuts import Edge, edge_of, enter, refuse_kept
from lohan.drive.watch.contract import Snapshot
from lohan.errors import ConfigError
from lohan.vocabulary import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor that entered the block."""

    key: ActivationKey
    is_owner: bool
    """Whether this block put it into the store; others only read it."""
    edge: Edge | None
    """Where its gradient goes; None if it requires none."""
    given: weakref.ref[torch.Tensor] | None
    """What this block put into the store, which may keep it as it is."""
    version: int


class EntryKeys:
    """Which tensors of one micro-batch are in the store already: masks enter every block."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, ActivationKey]] = {}

    def find(self, tensor: torch.Tensor) -> ActivationKey | None:
        """The key under which this very tensor, unchanged, was put before."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            return None
        return known[2]

    def note(self, tensor: torch.Tensor, key: ActivationKey) -> None:
        """Remember a tensor that was put."""
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, key)


class Arrivals:
    """Arguments of one call of a block: as the model gives them, and cut off, as the block gets
    them."""

    def __init__(self, leaves: list[Any], spec: TreeSpec) -> None:
        self.leaves, self.spec = leaves, spec
        self.tensors = {id(leaf): leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)}
        self.objects: Snapshot | None = None
        """Of what is neither a tensor nor plain, once the block is about to run."""
        self.noted: list[Any] = []
        """The leaves with an `Entry` in place of each tensor, once they are in the store."""
        self._inside: dict[int, torch.Tensor] = {}

    def versions(self) -> list[tuple[torch.Tensor, int]]:
        """The tensors, to find out later whether they were changed."""
        return [(tensor, tensor._version) for tensor in self.tensors.values()]

    def put(
        self, block: BlockId, micro_batch: int, store: ActivationStore, keys: EntryKeys
    ) -> None:
        """Put the tensors into the store, if no block before has done so."""
        here: dict[int, Entry] = {}
        for number, (identity, tensor) in enumerate(self.tensors.items()):
            key, given = keys.find(tensor), None
            is_owner = key is None
            if key is None:
                # What has no gradient (masks, positions) enters every block and stays.
                ordinal = ENTRY_ORDINAL if tensor.requires_grad else SIDE_ORDINAL
                key = ActivationKey(micro_batch, block, ordinal, number)
                value = tensor.detach()
                given = weakref.ref(value)
                store.put(key, value)
                keys.note(tensor, key)
            elif key.block != block:
                store.share(key, tensor.detach())
            edge = edge_of(tensor) if tensor.requires_grad else None
            here[identity] = Entry(
                key=key, is_owner=is_owner, edge=edge, given=given, version=tensor._version
            )
        self.noted = [here.get(id(leaf), leaf) for leaf in self.leaves]

    def enter(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the block: the start of a graph of its own."""
        others = [leaf for leaf in self.leaves if id(leaf) not in self.tensors]
        self.objects = Snapshot({"an argument": others})
        self._inside = {
            identity: enter(tensor.detach(), refuse_kept)
            if tensor.requires_grad
            else tensor.detach()
            for identity, tensor in self.tensors.items()
        }
        args, kwargs = tree_unflatten(
            [self._inside.get(id(leaf), leaf) for leaf in self.leaves], self.spec
        )
        return args, kwargs

    def originals(self) -> dict[int, torch.Tensor]:
        """For each tensor the block got, by identity, the model's."""
        return {id(self._inside[identity]): tensor for identity, tensor in self.tensors.items()}

    def refuse_hooks(self, what: str) -> None:
        """Hooks that a block puts on what it was given are for whole gradients."""
        for tensor in self._inside.values():
            if tensor._backward_hooks:
                raise ConfigError(
                    f"{what} puts a hook on the gradient of an argument of shape "
                    f"{tuple(tensor.shape)}",
                    why="other parts of the model may use that tensor too, and the hook would see "
                    "this block's share alone",
                    remedy="put it on a tensor of the block's own: `x = x.view_as(x)` first",
                )


def refuse_changed_objects(objects: Snapshot, what: str) -> None:
    """Raise if an object that was given to a block is not what it was then."""
    if objects.changed() is not None:
        raise ConfigError(
            f"an object among the arguments of {what} was changed after it",
            why="the block is run again from its arguments in backward, and would find another "
            "state there (a cache filled twice)",
            remedy="pass what the block reads as arguments and return what it makes; for a cache "
            "of keys and values, pass use_cache=False",
        )


def refuse_changed(tensor: torch.Tensor, version: int, what: str) -> None:
    """Raise if a tensor that entered a block was changed in place since."""
    if tensor._version != version:
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} that entered {what} was changed in place",
            why="the block is run again from its inputs in backward",
            remedy="write `x = x + y` instead of `x += y` for inputs of blocks",
        )
