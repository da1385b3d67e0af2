"""What devices have in common once they are open.

Owns the `with` statement, and answers of devices that have memory of their own. Base class of the
devices; called by nobody else.
"""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import torch

from lohan.device.device import ComputeQueue, Event, RamBuffer
from lohan.device.memory import DeviceMemory
from lohan.errors import HardwareError


class ClosingDevice(ABC):
    """A device that closes itself."""

    name: str

    @property
    def queue(self) -> ComputeQueue | None:
        """None: compute runs inside the call."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End it; each device its own way."""

    def adopt(self, ram: torch.Tensor | RamBuffer) -> DeviceMemory:
        """Refuse: most devices have memory of their own."""
        raise HardwareError(
            f"{self.name} cannot compute from main memory",
            why="it has memory of its own",
            remedy="allocate device memory and copy into it (see shares_ram)",
        )

    def trim(self) -> None:  # noqa: B027 - most devices keep nothing
        """Do nothing: what is freed is free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def foreign_event(event: Event, device_name: str) -> HardwareError:
    """Return what is raised for an event of another device."""
    return HardwareError(
        f"an event of type {type(event).__name__} was given to {device_name}",
        why="only the device that made an event understands it",
        remedy="use events of the same device",
    )
