"""What devices have in common once they are open.

Owns the `with` statement, pinned ranges, and the memory and generator of devices that are made of
main memory and the processor. Base classes of the devices; called by nobody else.
"""

from abc import ABC, abstractmethod
from typing import Self

import torch

from lohan.device.device import ComputeQueue, Event
from lohan.device.memory import DeviceMemory, MemoryLedger, allocate_flat, operators_unseen
from lohan.device.pinned import PinnedRanges
from lohan.errors import HardwareError, LohanError, bug


class ClosingDevice(ABC):
    """A device that closes itself, with the answers most of them give."""

    name: str
    _pinned: PinnedRanges
    _is_closed = False

    @property
    def reserved_peak_bytes(self) -> int | None:
        """None: nothing is held but what is alive."""
        return None

    @property
    def queue(self) -> ComputeQueue | None:
        """None: compute runs inside the call."""
        return None

    def pin(self, address: int, nbytes: int) -> None:
        """Lock main memory in place, where the device has a use for it."""
        self._check_open()
        self._pinned.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._pinned.unpin(address)

    def charge(  # noqa: B027 - most devices have a speed of their own
        self, *, num_flops: float = 0.0, num_bytes: float = 0.0, fixed_seconds: float = 0.0
    ) -> None:
        """Do nothing: this device has a speed of its own."""

    def trim(self) -> None:  # noqa: B027 - most devices keep nothing
        """Do nothing: what is freed is free."""

    @abstractmethod
    def close(self) -> None:
        """End it; each device its own way."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error(self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostDevice(ClosingDevice):
    """A device made of main memory, which it counts, and of the processor."""

    def __init__(self, name: str, reason: str, memory_bytes: int | None) -> None:
        self.name, self.reason = name, reason
        self.torch_device = torch.device("cpu")
        self.memory_bytes = memory_bytes
        self._ledger = MemoryLedger(name, memory_bytes)
        self._pinned = PinnedRanges()

    def alloc(self, nbytes: int) -> DeviceMemory:
        """Return main memory, counted as device memory."""
        self._check_open()
        self._ledger.take_slot(max(0, nbytes))
        try:
            return DeviceMemory(allocate_flat(nbytes, self.torch_device, self.name))
        except BaseException:
            self._ledger.return_slot(max(0, nbytes))
            raise

    @property
    def bytes_in_use(self) -> int:
        """Bytes allocated, and bytes held by tensors of compute where they are counted."""
        return self._ledger.bytes_in_use

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at once."""
        return self._ledger.peak_bytes

    def reset_peak(self) -> None:
        """Measure the peak anew."""
        self._ledger.reset_peak()

    def rng_state(self) -> torch.Tensor:
        """Return the state of torch's CPU generator, which compute draws from."""
        with operators_unseen():
            return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set torch's CPU generator."""
        with operators_unseen():
            torch.set_rng_state(state)


def foreign_event(event: Event, device_name: str) -> LohanError:
    """Return what is raised for an event of another device."""
    return bug(
        f"an event of type {type(event).__name__} was given to {device_name}, and only the device "
        "that made an event understands it",
        HardwareError,
    )


def closed_error(device_name: str) -> LohanError:
    """Return what is raised for work given to a device that was closed."""
    return bug(f"the {device_name} device was given work after it was closed", HardwareError)
