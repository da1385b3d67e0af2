"""The contract of a device: what the engine may ask of the GPU tier, and what it is promised.

Owns the Protocols and their rules; implementations are `cpu.py`, `emulated.py` and
`accelerator.py`. One suite, tests/contract/test_device_contract.py, judges all of them.

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

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

import torch

from lohan.device.memory import DeviceMemory
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


class Device(Protocol):
    """The GPU tier. Any thread may call any method; compute comes from one thread at a time."""

    name: str
    """Kind and number, for logs and reports."""
    reason: str
    """Why this device was chosen, in words for the user."""
    torch_device: torch.device
    """Where tensors for compute are made."""
    memory_bytes: int | None
    """Budget of everything alive on the device; None where nothing bounds it."""
    shares_ram: bool
    """See note "In place"."""

    @property
    def queue(self) -> ComputeQueue | None:
        """What the host may run ahead of; None where compute runs inside the call."""

    # Memory.

    def alloc(self, nbytes: int) -> DeviceMemory:
        """Return flat device memory with undefined content.

        Raises:
            DoesNotFit: if the budget or the device itself has no room.
        """

    def free(self, memory: DeviceMemory, *, is_idle: bool = False) -> None:
        """Give memory back. Views of it must not be used again; a second free raises.

        `is_idle`: compute that used it is over, so that it can be had again at once; else it can
        when what compute has queued by now is over.
        """

    @property
    def bytes_in_use(self) -> int:
        """Bytes alive on the device now."""

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once since the start or the last `reset_peak`."""

    @property
    def reserved_peak_bytes(self) -> int | None:
        """Most bytes held for reuse and alive, likewise; None where nothing is held for reuse."""

    def reset_peak(self) -> None:
        """Start measuring the peak anew from what is alive now."""

    def trim(self) -> None:
        """Give memory that is kept for reuse back to the system, after work of another shape."""

    def pin(self, address: int, nbytes: int) -> None:
        """Lock main memory in place, so that copies from and to it run at full speed.

        Raises:
            HardwareError: if the range is empty, overlaps a pinned one, or the system refuses.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`. Raises if nothing was pinned at this address."""

    # Copies.

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

    def compute(self) -> AbstractContextManager[None]:
        """Every tensor operation on the device happens within this; re-entry is fine.

        What it allocates counts as device memory. Raises DoesNotFit out of the body when the
        device runs out.
        """

    def charge(
        self, *, num_flops: float = 0.0, num_bytes: float = 0.0, fixed_seconds: float = 0.0
    ) -> None:
        """Say how much was computed since the last charge, for devices that emulate a speed.

        Call it inside `compute`, after the work; the finer the pieces, the truer the emulation.
        `fixed_seconds` is what the emulated system adds to the piece; a real device ignores it, and
        so does an emulated one whose compute has no rate.
        """

    def record(self) -> Event:
        """Return the point after all compute queued so far."""

    def compute_waits(self, event: Event) -> None:
        """Make compute queued from now on start after the event. The host may or may not wait."""

    # Host.

    def wait(self, event: Event) -> None:
        """Block the calling thread until the event is done.

        Raises:
            HardwareError: if the work before the event failed, or the device was closed under it.
        """

    def synchronize(self) -> None:
        """Block until all three queues are empty; raises the first failure among their copies."""

    def rng_state(self) -> torch.Tensor:
        """Return the state of the random numbers compute draws, for an exact re-run."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Go back to a state from `rng_state`."""

    def close(self) -> None:
        """Abandon or end queued copies, end all threads, unpin. A second call does nothing.

        When it returns, nothing of the device touches memory any more.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
