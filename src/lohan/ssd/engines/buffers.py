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
from lohan.units import format_bytes

_MOST_BYTES = 2**63 - 1


class Buffer:
    """A lease of aligned memory. After it was taken back every use is an error."""

    __slots__ = ("_memory", "_offset_bytes", "_pool", "nbytes")

    def __init__(
        self,
        pool: "BufferPool",
        memory: _native.AlignedMemory,
        *,
        offset_bytes: int,
        nbytes: int,
    ) -> None:
        self._pool = pool
        self._memory: _native.AlignedMemory | None = memory
        self._offset_bytes = offset_bytes
        self.nbytes = nbytes
        """The size that was asked for."""

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
    """Single buffers of any exact size, counted together.

    Runs on: any thread. May block: no (a buffer takes as long as its pages take to exist).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._leased: dict[int, Buffer] = {}
        self.in_use_bytes = 0
        """Bytes leased now."""
        self.peak_bytes = 0
        """Most bytes ever leased together."""
        self._is_closed = False

    def allocate(self, nbytes: int) -> Buffer:
        """Lease a buffer of exactly `nbytes` (to the page), given back when taken back.

        Raises:
            DoesNotFit: the system has no memory for it.
        """
        if nbytes <= 0:
            raise bug(f"a buffer of {nbytes} bytes was asked of pool {self.name!r}")
        try:
            if nbytes > _MOST_BYTES:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            memory = _native.AlignedMemory(nbytes, True)
        except OSError as error:
            raise DoesNotFit(
                f"pool {self.name!r} could not get {format_bytes(nbytes)} of RAM "
                f"({error.strerror or error})",
                why="the system has no memory left for it",
                remedy="lower the RAM budget, or close what else uses memory",
            ) from None
        with self._lock:
            self._refuse_if_closed()
            buffer = Buffer(self, memory, offset_bytes=0, nbytes=nbytes)
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

    def close(self) -> None:
        """Refuse further leases. Twice is fine.

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

    def _enter(self, buffer: Buffer) -> None:
        self._leased[id(buffer)] = buffer
        self.in_use_bytes += buffer.nbytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise bug(f"a lease was asked of pool {self.name!r} after it was closed")
