"""Flat device memory, the bytes a copy moves, and the ledger of what is alive.

Owns `DeviceMemory` (the same class on every device), `Span` (address and length of one end of a
copy) and `MemoryLedger` (budget, use and peak of devices that count for themselves). Does not
allocate or copy: devices do.
"""

import ctypes
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes as operators_unseen

from lohan.errors import DoesNotFit, HardwareError, LohanError, bug
from lohan.units import format_bytes
from lohan.vocabulary import Lane

if TYPE_CHECKING:
    from lohan.device.device import CopyEnd, RamBuffer

__all__ = [
    "DeviceMemory",
    "MemoryLedger",
    "Span",
    "allocate_flat",
    "check_ends",
    "operators_unseen",
    "ram_tensor",
    "wrong_side",
]
# `operators_unseen` keeps torch calls made by a device itself out of the dispatch modes of its
# callers, which count the operators of a model one by one.


class DeviceMemory:
    """A run of bytes on a device, made by `Device.alloc`."""

    __slots__ = ("_flat", "address", "is_free", "nbytes")

    def __init__(self, flat: torch.Tensor) -> None:
        """`flat` is one-dimensional, of uint8."""
        self._flat: torch.Tensor | None = flat
        self.address = flat.data_ptr()
        self.nbytes = flat.numel()
        self.is_free = False

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], *, offset_bytes: int = 0
    ) -> torch.Tensor:
        """Return the bytes from `offset_bytes` on as a contiguous tensor; no copy.

        Raises:
            HardwareError: if it reaches past the end, is misaligned, or the memory was freed.
        """
        flat = self._alive()
        end = offset_bytes + math.prod(shape) * dtype.itemsize
        if offset_bytes < 0 or min(shape, default=0) < 0 or end > self.nbytes:
            raise bug(
                f"a {dtype} tensor of shape {tuple(shape)} at byte {offset_bytes} ends at byte "
                f"{end} of device memory that has {self.nbytes}",
                HardwareError,
            )
        if offset_bytes % dtype.itemsize or self.address % dtype.itemsize:
            raise bug(
                f"a {dtype} tensor cannot start at byte {offset_bytes} of memory at "
                f"{self.address:#x}: both must be multiples of {dtype.itemsize}",
                HardwareError,
            )
        with operators_unseen():
            return flat[offset_bytes:end].view(dtype).view(tuple(shape))

    def bytes(self) -> torch.Tensor:
        """Return all bytes as one uint8 tensor; no copy. Raises if the memory was freed."""
        return self._alive()

    def invalidate(self) -> None:
        """Forget the bytes; for the device that frees them.

        Raises:
            HardwareError: if it happened before.
        """
        self._alive()
        self._flat, self.is_free = None, True

    def _alive(self) -> torch.Tensor:
        if self._flat is None:
            raise bug(
                f"{format_bytes(self.nbytes)} of device memory were used after they were freed",
                HardwareError,
            )
        return self._flat


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One end of a copy: its bytes, and what keeps them alive."""

    address: int
    nbytes: int
    owner: object
    memory: DeviceMemory | None = None
    """Whether these bytes are still device memory; freeing it does not take them away from here."""

    @classmethod
    def of(cls, end: "CopyEnd") -> "Span":
        """Return the bytes that an end covers.

        Raises:
            HardwareError: if a tensor is not dense, or device memory was freed.
        """
        if isinstance(end, DeviceMemory):
            flat = end.bytes()
            return cls(address=end.address, nbytes=end.nbytes, owner=flat, memory=end)
        if isinstance(end, torch.Tensor):
            if not _is_dense(end):
                raise bug(
                    f"a tensor of shape {tuple(end.shape)} and strides {end.stride()} cannot be "
                    "copied as bytes: its elements leave holes or overlap in memory",
                    HardwareError,
                )
            nbytes = end.numel() * end.element_size()
            return cls(address=end.data_ptr(), nbytes=nbytes, owner=end)
        return cls(address=end.address, nbytes=end.nbytes, owner=end)

    def overlaps(self, other: "Span") -> bool:
        """Whether any byte belongs to both."""
        return (
            self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    # Dense in some order of dimensions: sorted by stride, each one is the size of what is inside.
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def check_ends(dst: "CopyEnd", src: "CopyEnd", lane: Lane) -> tuple[Span, Span]:
    """Return the spans of a copy's ends.

    Raises:
        HardwareError: if the lane carries no copies, an end lies on the wrong side, or the ends
            differ in bytes.
    """
    if lane is Lane.RAM_TO_GPU:
        ram_end = src
    elif lane is Lane.GPU_TO_RAM:
        ram_end = dst
    else:
        raise bug(f"the lane {lane} carries no copies between GPU and RAM", HardwareError)
    if isinstance(ram_end, DeviceMemory):
        raise wrong_side(lane, "device memory", "main memory")
    dst_span, src_span = Span.of(dst), Span.of(src)
    if dst_span.nbytes != src_span.nbytes:
        raise bug(
            f"a copy on {lane} goes from {src_span.nbytes} to {dst_span.nbytes} bytes",
            HardwareError,
        )
    return dst_span, src_span


def wrong_side(lane: Lane, found: str, expected: str) -> LohanError:
    """Return what is raised for a copy with an end on the other side than its lane says."""
    return bug(f"a copy on {lane} has {found} where {expected} belongs", HardwareError)


def ram_tensor(ram: "torch.Tensor | RamBuffer") -> torch.Tensor:
    """Return main memory as one flat uint8 tensor at the same address; no copy.

    Owns nothing: whoever holds the result also keeps `ram` alive.

    Raises:
        HardwareError: if a tensor is not dense.
    """
    span = Span.of(ram)
    with operators_unseen():
        if span.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # By address for tensors too: the result starts a storage of its own, so that typed views
        # of it do not depend on where in some larger storage the tensor began.
        memory = (ctypes.c_ubyte * span.nbytes).from_address(span.address)
        return torch.frombuffer(memory, dtype=torch.uint8)


class MemoryLedger:
    """Bytes alive on a device that counts for itself: use, peak, budget. Safe from any thread."""

    def __init__(self, device_name: str, memory_bytes: int | None) -> None:
        self._device_name, self._memory_bytes = device_name, memory_bytes
        self._lock = threading.Lock()
        self._slots_bytes = self._compute_bytes = self._peak_bytes = 0
        # Tensors may die anywhere, even inside a collection triggered while the lock is held, so
        # what they give back is only noted here and booked by the next caller.
        self._returned_by_compute: deque[int] = deque()

    def take_slot(self, nbytes: int) -> None:
        """Book an allocation. Raises DoesNotFit beyond the budget, and then books nothing."""
        with self._lock:
            self._check(nbytes, "allocating")
            self._slots_bytes += nbytes

    def return_slot(self, nbytes: int) -> None:
        """Undo `take_slot`."""
        with self._lock:
            self._slots_bytes -= nbytes

    def take_compute(self, nbytes: int) -> None:
        """Book a tensor made by compute. Raises DoesNotFit beyond the budget."""
        with self._lock:
            self._check(nbytes, "computing a tensor of")
            self._compute_bytes += nbytes

    def return_compute(self, nbytes: int) -> None:
        """Note that a tensor made by compute died. Never blocks."""
        self._returned_by_compute.append(nbytes)

    @property
    def bytes_in_use(self) -> int:
        """Bytes alive now."""
        with self._lock:
            self._book_returned()
            return self._slots_bytes + self._compute_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once since the last `reset_peak`."""
        with self._lock:
            return self._peak_bytes

    def reset_peak(self) -> None:
        """Make what is alive now the peak."""
        with self._lock:
            self._book_returned()
            self._peak_bytes = self._slots_bytes + self._compute_bytes

    def _book_returned(self) -> None:
        while self._returned_by_compute:
            self._compute_bytes -= self._returned_by_compute.popleft()

    def _check(self, nbytes: int, doing: str) -> None:
        """Raise DoesNotFit where there is no room for so many more; else they count as in use."""
        self._book_returned()
        needed = self._slots_bytes + self._compute_bytes + nbytes
        if self._memory_bytes is not None and needed > self._memory_bytes:
            raise DoesNotFit(
                f"{doing} {format_bytes(nbytes)} on the {self._device_name} device needs "
                f"{format_bytes(needed)} of GPU memory, {format_bytes(self._memory_bytes)} allowed",
                why=f"{format_bytes(self._slots_bytes)} are allocated for weights, gradients and "
                f"copies, and {format_bytes(self._compute_bytes)} are held by tensors of compute",
                remedy="raise the gpu budget, or use smaller micro-batches or shorter sequences",
            )
        self._peak_bytes = max(self._peak_bytes, needed)


def allocate_flat(nbytes: int, torch_device: torch.device, device_name: str) -> torch.Tensor:
    """Return uninitialised bytes from torch.

    Raises:
        HardwareError: if the number is negative.
        DoesNotFit: if torch has no memory left.
    """
    if nbytes < 0:
        raise bug(f"{nbytes} bytes of device memory were asked for: negative", HardwareError)
    try:
        with operators_unseen():
            return torch.empty(nbytes, dtype=torch.uint8, device=torch_device)
    except torch.AcceleratorError:
        raise  # the device has failed, whatever the size
    # Too large for the allocator, for the element count, or for a 64-bit integer.
    except (RuntimeError, TypeError, OverflowError) as error:
        raise DoesNotFit(
            f"allocating {format_bytes(nbytes)} on the {device_name} device failed",
            why=f"torch says: {str(error).splitlines()[0]}",
            remedy="lower the gpu budget or free memory used by other programs",
        ) from error
