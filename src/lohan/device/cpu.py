"""The cpu device: the GPU tier is main memory, and compute runs on the processor.

Owns the shortest implementation of the contract: every queue is empty when a call returns, and a
copy whose ends are the same memory vanishes. Chosen when there is no GPU. Owns too what devices
made of main memory and the processor have in common, for `emulated.py`.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import torch

from lohan.device.device import CopyEnd, Device, Event
from lohan.device.memory import (
    DeviceMemory,
    MemoryLedger,
    allocate_flat,
    check_ends,
    operators_unseen,
)
from lohan.vocabulary import Lane


class HostDevice(Device):
    """A device made of main memory, which it counts, and of the processor."""

    def __init__(self, name: str, reason: str, memory_bytes: int | None) -> None:
        super().__init__(name, reason)
        self.torch_device = torch.device("cpu")
        self.memory_bytes = memory_bytes
        self._ledger = MemoryLedger(name, memory_bytes)

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


class _Done:
    """The only event there is: everything before it has happened."""

    def is_done(self) -> bool:
        return True


_DONE = _Done()


class CpuDevice(HostDevice):
    """Main memory and processor as the GPU tier."""

    shares_ram = True

    def __init__(self, *, memory_bytes: int | None = None, reason: str = "asked for") -> None:
        super().__init__("cpu", reason, memory_bytes)

    def free(self, memory: DeviceMemory, *, is_idle: bool = False) -> None:
        """Give memory back to torch."""
        memory.invalidate()
        self._ledger.return_slot(memory.nbytes)

    def copy_async(
        self, dst: CopyEnd, src: CopyEnd, *, lane: Lane, after: Sequence[Event] = ()
    ) -> Event:
        """Copy at once on the calling thread, or not at all where both ends are one memory."""
        self._check_open()
        dst_span, src_span = check_ends(dst, src, lane)
        if dst_span.address != src_span.address and dst_span.nbytes:
            ctypes.memmove(dst_span.address, src_span.address, dst_span.nbytes)
        return _DONE

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Compute on the calling thread."""
        self._check_open()
        yield

    def record(self) -> Event:
        """Return an event that is done, for compute is."""
        return _DONE

    def compute_waits(self, event: Event) -> None:
        """Do nothing: every event is done."""

    def wait(self, event: Event) -> None:
        """Do nothing: every event is done."""

    def synchronize(self) -> None:
        """Do nothing: every queue is empty."""

    def close(self) -> None:
        """Refuse further work."""
        self._unpin_all()
        self._is_closed = True
