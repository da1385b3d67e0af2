"""The contract of a device: what the engine may ask of the GPU tier, and what it is promised.

Owns the contract, and what all devices have in common: the `with` statement, the books of pinned
memory. Implementations are `cpu.py`, `emulated.py` and `accelerator.py`. One suite,
tests/contract/test_device_contract.py, judges all of them.

Note "Queues". A device has three queues: compute, and one copy lane per direction. Each runs its
work in the order given, and none waits for another unless told to by an event: `after=` makes a
copy wait for events, `compute_waits` makes compute wait for one, `wait` makes the host wait. Both
copy lanes run at the same time. Memory from `alloc` is ready for copies at once; a tensor made or
read by compute is so after a `record` taken later. Whether the host goes on while compute runs
differs: a GPU computes behind its back, the other devices inside the call. Code must be right for
both.

Note "Who may touch what". From `copy_async` until its event is done, the copy owns both ends: the
destination holds nothing useful, the source must not change, and neither may be freed. The device
keeps Python tensors of a copy alive that long; memory behind a bare address is the caller's duty.
Once compute waits for a copy (`compute_waits`), its end on the device belongs to compute again:
what compute does with that memory from then on comes after the copy, whenever the host lets go.

Note "In place". Where `shares_ram` is true the device computes straight from main memory: a copy
whose ends are the same memory is done before it starts.

Note "Bytes". Copies move bytes and know no types. A tensor takes part with the bytes it covers, so
it must be dense (no holes, no overlaps); whoever copies it back uses the same strides.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

import torch

from lohan.device.memory import DeviceMemory
from lohan.errors import HardwareError, LohanError, bug
from lohan.vocabulary import Lane


class RamBuffer(Protocol):
    """Main memory known by its address, such as a leased buffer."""

    @property
    def address(self) -> int:
        """First byte."""

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""


CopyEnd = DeviceMemory | torch.Tensor | RamBuffer
"""What `copy_async` copies from or to."""


class Event(Protocol):
    """A point in one of the queues. Made by a device and understood only by that device."""

    def is_done(self) -> bool:
        """Whether everything before this point has ended, well or badly. Never blocks."""


class ComputeQueue(Protocol):
    """Compute that goes on behind the host's back. Any thread may call any method."""

    def record(self) -> Event:
        """As of the device."""

    def wait(self, event: Event) -> None:
        """As of the device."""

    def seconds_between(self, first: Event, second: Event) -> float:
        """Seconds by the device's own clock between two points of compute that are done."""

    def copy_in(self, dst: DeviceMemory, src: CopyEnd) -> None:
        """Copy from main memory as a piece of compute: after what is queued, before what will be.

        The source must stay as it is until compute queued so far is over.
        """


class Device(ABC):
    """The GPU tier. Any thread may call any method; compute comes from one thread at a time."""

    torch_device: torch.device
    """Where tensors for compute are made."""
    memory_bytes: int | None
    """Budget of everything alive on the device; None where nothing bounds it."""
    shares_ram: bool
    """See note "In place"."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        """Kind and number, for logs and reports."""
        self.reason = reason
        """Why this device was chosen, in words for the user."""
        self._is_closed = False
        self._pinned: dict[int, int] = {}  # bytes of each range by its address
        self._pin_lock = threading.Lock()

    @property
    def queue(self) -> ComputeQueue | None:
        """What the host may run ahead of; None where compute runs inside the call."""
        return None

    # Memory.

    @abstractmethod
    def alloc(self, nbytes: int) -> DeviceMemory:
        """Return flat device memory with undefined content.

        Raises:
            DoesNotFit: if the budget or the device itself has no room.
        """

    @abstractmethod
    def free(self, memory: DeviceMemory, *, is_idle: bool = False) -> None:
        """Give memory back. Views of it must not be used again; a second free raises.

        `is_idle`: compute that used it is over, so that it can be had again at once; else it can
        when what compute has queued by now is over.
        """

    @property
    @abstractmethod
    def bytes_in_use(self) -> int:
        """Bytes alive on the device now."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Most bytes alive at once since the start or the last `reset_peak`."""

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Most bytes held for reuse and alive, likewise; None where nothing is held for reuse."""
        return None

    @abstractmethod
    def reset_peak(self) -> None:
        """Start measuring the peak anew from what is alive now."""

    def trim(self) -> None:  # noqa: B027 - most devices keep nothing
        """Give memory that is kept for reuse back to the system, after work of another shape."""

    def pin(self, address: int, nbytes: int) -> None:
        """Lock main memory in place, so that copies from and to it run at full speed.

        Raises:
            HardwareError: if the range is empty, overlaps a pinned one, or the system refuses.
        """
        self._check_open()
        with self._pin_lock:
            if address <= 0 or nbytes <= 0:
                raise bug(
                    f"{nbytes} bytes at address {address} cannot be pinned: there is no memory "
                    "there",
                    HardwareError,
                )
            for start, length in self._pinned.items():
                if address < start + length and start < address + nbytes:
                    raise bug(
                        f"{nbytes} bytes at {address:#x} overlap {length} bytes at {start:#x} that "
                        "are pinned already",
                        HardwareError,
                    )
            self._lock_range(address, nbytes)
            self._pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        """Undo `pin`. Raises if nothing was pinned at this address."""
        with self._pin_lock:
            if address not in self._pinned:
                raise bug(f"nothing is pinned at {address:#x}", HardwareError)
            self._unlock_range(address)
            del self._pinned[address]

    def _unpin_all(self) -> None:
        with self._pin_lock:
            while self._pinned:
                address, _ = self._pinned.popitem()
                self._unlock_range(address)

    def _lock_range(self, address: int, nbytes: int) -> None:  # noqa: B027
        """Nothing: the device reads main memory itself, unless it says otherwise."""

    def _unlock_range(self, address: int) -> None:  # noqa: B027
        """Undo `_lock_range`."""

    # Copies.

    @abstractmethod
    def copy_async(
        self, dst: CopyEnd, src: CopyEnd, *, lane: Lane, after: Sequence[Event] = ()
    ) -> Event:
        """Queue a copy on `Lane.GPU_TO_RAM` or `Lane.RAM_TO_GPU`; it starts after the events.

        Runs on the lane. May block: only on a device whose copies are plain memory copies.
        Owns both ends until the event is done; see note "Who may touch what".

        Raises:
            HardwareError: if the ends differ in bytes, lie on the wrong side, or are not dense.
        """

    # Compute.

    @abstractmethod
    def compute(self) -> AbstractContextManager[None]:
        """Every tensor operation on the device happens within this; re-entry is fine.

        What it allocates counts as device memory. Raises DoesNotFit out of the body when the
        device runs out.
        """

    def charge(  # noqa: B027 - most devices have a speed of their own
        self, *, num_flops: float = 0.0, num_bytes: float = 0.0, fixed_seconds: float = 0.0
    ) -> None:
        """Say how much was computed since the last charge, for devices that emulate a speed.

        Call it inside `compute`, after the work; the finer the pieces, the truer the emulation.
        `fixed_seconds` is what the emulated system adds to the piece; a real device ignores it, and
        so does an emulated one whose compute has no rate.
        """

    @abstractmethod
    def record(self) -> Event:
        """Return the point after all compute queued so far."""

    @abstractmethod
    def compute_waits(self, event: Event) -> None:
        """Make compute queued from now on start after the event. The host may or may not wait."""

    # Host.

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Block the calling thread until the event is done.

        Raises:
            HardwareError: if the work before the event failed, or the device was closed under it.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all three queues are empty; raises the first failure among their copies."""

    @abstractmethod
    def rng_state(self) -> torch.Tensor:
        """Return the state of the random numbers compute draws, for an exact re-run."""

    @abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Go back to a state from `rng_state`."""

    @abstractmethod
    def close(self) -> None:
        """Abandon or end queued copies, end all threads, unpin. A second call does nothing.

        When it returns, nothing of the device touches memory any more.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error(self.name)


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
