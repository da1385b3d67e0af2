"""The cpu device: the GPU tier is main memory, and compute runs on the processor.

Owns the shortest implementation of the contract: every queue is empty when a call returns, and a
copy whose ends are the same memory vanishes. Chosen when there is no GPU.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

from lohan.device.closing import HostDevice
from lohan.device.device import CopyEnd, Event
from lohan.device.memory import DeviceMemory, check_ends
from lohan.vocabulary import Lane


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
        self._pinned.unpin_all()
        self._is_closed = True
