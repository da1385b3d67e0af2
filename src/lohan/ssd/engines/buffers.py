"""Aligned host memory, leased and taken back, for direct I/O and (later) for pinning.

Owns the pool, its leases and its books. Leasing never blocks: a schedule says when a buffer is
free, so a lease that cannot be had is a mistake of the schedule and an error. Knows no tensors and
no files. Leased by whoever moves bytes; addresses go to an `IoEngine`.
"""

import errno
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from lohan import _native
from lohan.errors import DoesNotFit, bug
from lohan.ssd.engines.engine import whole_pages
from lohan.units import MIB, format_bytes

REGION_BYTES = 64 * MIB
"""Memory is taken from the system in regions of about this size: pinning a few modest regions
works where pinning one huge one fails, and a region is given back whole."""
_MOST_BYTES = 2**63 - 1


class Buffer:
    """A lease of aligned memory. After it was taken back every use is an error."""

    __slots__ = ("_memory", "_offset_bytes", "_pool", "_slot", "nbytes")

    def __init__(
        self,
        pool: "BufferPool",
        memory: _native.AlignedMemory,
        *,
        offset_bytes: int,
        nbytes: int,
        slot: int | None,
    ) -> None:
        self._pool = pool
        self._memory: _native.AlignedMemory | None = memory
        self._offset_bytes = offset_bytes
        self.nbytes = nbytes
        """The size that was asked for."""
        self._slot = slot

    @property
    def address(self) -> int:
        """Of the first byte; a multiple of 4096."""
        return self._alive().address + self._offset_bytes

    @property
    def view(self) -> memoryview:
        """The bytes, writable."""
        start = self._offset_bytes
        return memoryview(self._alive())[start : start + self.nbytes]

    def array(self, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """The bytes as a numpy array, without a copy."""
        return np.frombuffer(self.view, dtype=dtype)

    def _alive(self) -> _native.AlignedMemory:
        if self._memory is None:
            raise bug(f"a buffer of pool {self._pool.name!r} was used after it was taken back")
        return self._memory

    def __enter__(self) -> "Buffer":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.take_back(self)


class BufferPool:
    """A fixed number of equal slots, plus single buffers of any exact size.

    Runs on: any thread. May block: no (making the pool takes as long as its pages take to exist).

    Raises:
        DoesNotFit: the system has no memory for the slots.
    """

    def __init__(
        self, *, name: str, slot_bytes: int, num_slots: int, region_bytes: int = REGION_BYTES
    ) -> None:
        if slot_bytes <= 0 or num_slots < 0 or region_bytes <= 0:
            raise bug(
                f"pool {name!r} was given {num_slots} slots of {slot_bytes} bytes in regions of "
                f"{region_bytes}"
            )
        self.name = name
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._lock = threading.Lock()
        self._stride_bytes = whole_pages(slot_bytes)
        self._slots_per_region = max(1, region_bytes // self._stride_bytes)
        self._regions: list[_native.AlignedMemory] = []
        for first in range(0, num_slots, self._slots_per_region):
            num_here = min(self._slots_per_region, num_slots - first)
            self._regions.append(self._allocate_memory(num_here * self._stride_bytes))
        # The slot that came back last is leased first: its pages are the warmest.
        self._free_slots = list(reversed(range(num_slots)))
        self._leased: dict[int, Buffer] = {}
        self.in_use_bytes = 0
        """Bytes leased now, slots and single buffers together."""
        self.peak_bytes = 0
        """Most bytes ever leased together."""
        self._is_closed = False

    @property
    def regions(self) -> tuple[tuple[int, int], ...]:
        """Address and bytes of each region of slots: what to pin."""
        return tuple((region.address, region.mapped_bytes) for region in self._regions)

    @property
    def reserved_bytes(self) -> int:
        """Memory held for slots, leased or not."""
        return sum(region.mapped_bytes for region in self._regions)

    def lease(self, nbytes: int | None = None) -> Buffer:
        """Lease a slot, or the first `nbytes` of one.

        Raises:
            ScheduleError: no slot is free, or the slots are too small.
        """
        nbytes = self.slot_bytes if nbytes is None else nbytes
        if not 0 < nbytes <= self.slot_bytes:
            raise bug(
                f"{nbytes} bytes were asked of pool {self.name!r}: its slots have "
                f"{self.slot_bytes} bytes"
            )
        with self._lock:
            self._refuse_if_closed()
            if not self._free_slots:
                raise bug(
                    f"all {self.num_slots} slots of pool {self.name!r} "
                    f"({format_bytes(self.slot_bytes)} each) are leased, and leasing never waits"
                )
            slot = self._free_slots.pop()
            region = self._regions[slot // self._slots_per_region]
            offset_bytes = slot % self._slots_per_region * self._stride_bytes
            buffer = Buffer(self, region, offset_bytes=offset_bytes, nbytes=nbytes, slot=slot)
            self._enter(buffer)
        return buffer

    def allocate(self, nbytes: int) -> Buffer:
        """Make a single buffer of exactly `nbytes` (to the page), given back when taken back.

        Raises:
            DoesNotFit: the system has no memory for it.
        """
        if nbytes <= 0:
            raise bug(f"a buffer of {nbytes} bytes was asked of pool {self.name!r}")
        memory = self._allocate_memory(nbytes)
        with self._lock:
            self._refuse_if_closed()
            buffer = Buffer(self, memory, offset_bytes=0, nbytes=nbytes, slot=None)
            self._enter(buffer)
        return buffer

    def part_of(self, whole: Buffer, offset_bytes: int, nbytes: int) -> Buffer:
        """Lease a part of a buffer; the caller knows which parts are free."""
        with self._lock:
            self._refuse_if_closed()
            part = Buffer(
                self,
                whole._alive(),
                offset_bytes=whole._offset_bytes + offset_bytes,
                nbytes=nbytes,
                slot=None,
            )
            self._enter(part)
        return part

    def take_back(self, buffer: Buffer) -> None:
        """End a lease. Views made of it stay safe to read but mean nothing any more.

        Raises:
            ScheduleError: it was taken back before, or belongs to another pool.
        """
        with self._lock:
            if self._leased.pop(id(buffer), None) is None:
                raise bug(
                    f"pool {self.name!r} was given a buffer that is not leased from it: it was "
                    "taken back before, or belongs to another pool"
                )
            self.in_use_bytes -= buffer.nbytes
            buffer._memory = None
            if buffer._slot is not None:
                self._free_slots.append(buffer._slot)

    def close(self) -> None:
        """Give all memory back to the system. Twice is fine.

        Raises:
            ScheduleError: leases are still out; their memory stays, nothing is pulled away.
        """
        with self._lock:
            if self._leased:
                sizes = sorted((buffer.nbytes for buffer in self._leased.values()), reverse=True)
                raise bug(
                    f"pool {self.name!r} was closed with {len(sizes)} buffers out "
                    f"({format_bytes(sum(sizes))}, the largest {sizes[0]} bytes)"
                )
            self._is_closed = True
            self._regions.clear()
            self._free_slots.clear()

    def _enter(self, buffer: Buffer) -> None:
        self._leased[id(buffer)] = buffer
        self.in_use_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise bug(f"a lease was asked of pool {self.name!r} after it was closed")

    def _allocate_memory(self, nbytes: int) -> _native.AlignedMemory:
        try:
            if nbytes > _MOST_BYTES:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return _native.AlignedMemory(nbytes, True)
        except OSError as error:
            raise DoesNotFit(
                f"pool {self.name!r} could not get {format_bytes(nbytes)} of RAM "
                f"({error.strerror or error})",
                why="the system has no memory left for it",
                remedy="lower the RAM budget, or close what else uses memory",
            ) from None
