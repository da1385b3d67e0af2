"""The cpu device: the GPU tier is main memory, and compute runs on the processor.

Owns the shortest implementation of the contract: every queue is empty when a call returns, and a
copy whose ends are the same memory vanishes. Chosen when there is no GPU.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import torch

from lohan.device.closing import ClosingDevice
from lohan.device.device import CopyEnd, Event, RamBuffer
from lohan.device.memory import (
    DeviceMemory,
    MemoryLedger,
    allocate_flat,
    check_ends,
    closed_error,
    operators_unseen,
    ram_tensor,
)
from lohan.device.pinned import PinnedRanges
from lohan.device.storages import CountedCompute, StorageBook
from lohan.vocabulary import Lane


class _Done:
    """The only event there is: everything before it has happened."""

    def is_done(self) -> bool:
        return True


_DONE = _Done()


class CpuDevice(ClosingDevice):
    """Main memory and processor as the GPU tier."""

    shares_ram = True

    def __init__(
        self,
        *,
        memory_bytes: int | None = None,
        counts_compute: bool = False,
        reason: str = "asked for",
    ) -> None:
        """`counts_compute` books the tensors of compute too, at some microseconds per operator."""
        self.name, self.reason = "cpu", reason
        self.torch_device = torch.device("cpu")
        self.memory_bytes = memory_bytes
        self._ledger = MemoryLedger(self.name, memory_bytes)
        self._book = StorageBook(self._ledger) if counts_compute else None
        self._pinned = PinnedRanges()
        self._is_closed = False

    def alloc(self, nbytes: int) -> DeviceMemory:
        """Return main memory, counted as device memory."""
        self._check_open()
        self._ledger.take_slot(max(0, nbytes))
        try:
            return DeviceMemory(allocate_flat(nbytes, self.torch_device, self.name))
        except BaseException:
            self._ledger.return_slot(max(0, nbytes))
            raise

    def free(self, memory: DeviceMemory) -> None:
        """Give memory back to torch; adopted memory goes back to its owner."""
        memory.invalidate()
        if not memory.is_adopted:
            self._ledger.return_slot(memory.nbytes)

    def adopt(self, ram: torch.Tensor | RamBuffer) -> DeviceMemory:
        """Use main memory in place."""
        self._check_open()
        return DeviceMemory(ram_tensor(ram), is_adopted=True, owner=ram)

    @property
    def bytes_in_use(self) -> int:
        """Bytes allocated, and bytes of compute where they are counted."""
        return self._ledger.bytes_in_use

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at once."""
        return self._ledger.peak_bytes

    def reset_peak(self) -> None:
        """Measure the peak anew."""
        self._ledger.reset_peak()

    def pin(self, address: int, nbytes: int) -> None:
        """Check the range; nothing needs pinning here."""
        self._check_open()
        self._pinned.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._pinned.unpin(address)

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
        if self._book is None:
            yield
        else:
            with CountedCompute(self._book):
                yield

    def charge(
        self, *, num_flops: float = 0.0, num_bytes: float = 0.0, fixed_seconds: float = 0.0
    ) -> None:
        """Do nothing: this device has a speed of its own."""

    def record(self) -> Event:
        """Return an event that is done, for compute is."""
        return _DONE

    def compute_waits(self, event: Event) -> None:
        """Do nothing: every event is done."""

    def wait(self, event: Event) -> None:
        """Do nothing: every event is done."""

    def synchronize(self) -> None:
        """Do nothing: every queue is empty."""

    def rng_state(self) -> torch.Tensor:
        """Return the state of torch's CPU generator."""
        with operators_unseen():
            return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set torch's CPU generator."""
        with operators_unseen():
            torch.set_rng_state(state)

    def close(self) -> None:
        """Refuse further work."""
        self._pinned.unpin_all()
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error(self.name)
