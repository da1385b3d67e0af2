"""The caller's activation store, with a list of what a step has put into it.

Owns nothing but the list: a step that fails drops what it put, so the store is as before.
Called by `segmented_model`.
"""

import torch

from lohan.drive.activations.swap_modes import ActivationKey, ActivationStore


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
