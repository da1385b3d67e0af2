"""An `ActivationStore` that leaves everything where it is."""

import torch

from lohan.drive.activations.store import ActivationKey


class KeepStore:
    """The choice KEEP: tensors stay where they are."""

    def __init__(self) -> None:
        self._tensors: dict[ActivationKey, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def put(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Hold on to the tensor."""
        if key in self._tensors:
            raise AssertionError(f"{key} was put twice")
        self._tensors[key] = tensor

    def get(self, key: ActivationKey) -> torch.Tensor:
        """The tensor itself."""
        return self._tensors[key]

    def share(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Nothing to do: it is here all the time."""

    def drop(self, key: ActivationKey) -> None:
        """Let go of the tensor."""
        del self._tensors[key]
