"""Activations between forward and backward: their keys, and what a plan chooses.

Owns names; the store itself is `lanes.activation_moves`. Used by `captured`, `edges` and
`block_run`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from lohan.vocabulary import BlockId

ENTRY_ORDINAL = -1
"""Stands in an `ActivationKey` for a tensor with a gradient that entered the block; `output` then
counts what entered."""
SIDE_ORDINAL = -2
"""The same for a tensor without a gradient, which later blocks may ask for too."""


class ActivationKey(NamedTuple):
    """Which activation: output `output` of operator `ordinal` of one block and micro-batch."""

    micro_batch: int
    block: BlockId
    ordinal: int
    output: int


class ActivationStore(Protocol):
    """Where activations wait between forward and backward.

    A tensor given to `put` is not changed until it is dropped, so a store may keep it as it is or
    copy it in the background. `get` may be called several times before `drop`.
    """

    def put(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Take the tensor. Runs on the main thread, between two operators of the block."""

    def get(self, key: ActivationKey) -> torch.Tensor:
        """Give the tensor back, on the device it came from, with equal strides and bits.

        Content that its block changes in place later on may be changed in what is given.
        """

    def share(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """A later block needs this tensor, which was put, too: it will be asked for earlier than
        the other tensors of its block."""

    def drop(self, key: ActivationKey) -> None:
        """Forget the tensor, which may be changed from now on. Every key put is dropped once:
        after its last `get`, on failure, or to be put again with a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChoices:
    """What happens to the operator outputs of one block; those not named are recomputed.

    Attributes:
        stored: ordinals (`model.tracing.trace_ops`, "Which calls are counted") of operators whose
            outputs go to the store, as far as backward reads them.
        kept: those of them that stay where they are: no store is asked.
        names: for some ordinals the operator expected there (`addmm`). Where a block runs others,
            all of it is recomputed.
    """

    stored: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    names: Mapping[int, str] = field(default_factory=dict)


class LiveKeys:
    """An `ActivationStore` that passes everything on and knows what is still in it."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self._live: dict[ActivationKey, None] = {}

    def __len__(self) -> int:
        return len(self._live)

    def put(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Pass on."""
        self._store.put(key, tensor)
        self._live[key] = None

    def get(self, key: ActivationKey) -> torch.Tensor:
        """Pass on."""
        return self._store.get(key)

    def share(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Pass on."""
        self._store.share(key, tensor)

    def drop(self, key: ActivationKey) -> None:
        """Pass on."""
        del self._live[key]
        self._store.drop(key)

    def drop_all(self) -> None:
        """Leave nothing behind."""
        while self._live:
            self._store.drop(self._live.popitem()[0])
