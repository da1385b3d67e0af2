"""What a store gives back for a request, what it needs of a piece of memory, and its traffic.

Owns the ticket all stores of this folder share, and the counts of requests where they start. Made
by the stores; held by whoever asked.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lohan.errors import StorageError, bug
from lohan.ssd import ALIGNMENT_BYTES, StripedTicket, whole_pages
from lohan.store.format.layout import ComputeFormat, Part


class RamBuffer(Protocol):
    """Aligned main memory, such as a leased `Buffer`."""

    @property
    def address(self) -> int:
        """Of the first byte; a multiple of 4096."""

    @property
    def nbytes(self) -> int:
        """How much there is; whole pages of it may be used."""

    @property
    def view(self) -> memoryview:
        """The bytes, writable; keeps them alive."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoreTicket:
    """The promise of one request to a store.

    Until it was waited for, the memory belongs to the store. A request that needed no SSD is done
    from the start; `memory` then may be the store's own, to be used in place and not kept.
    """

    memory: RamBuffer
    offset_bytes: int
    """Where in the memory the bytes are."""
    num_elements: int
    """Elements that count; the rest of the last page is padding."""
    dtype: torch.dtype
    key: object
    """What the store asked itself for: a block, an activation."""
    striped: StripedTicket | None
    """The request to the SSDs; None if there was none."""
    ended: Callable[["StoreTicket", StorageError | None], None] | None = None
    """What the store enters into its books each time the ticket was waited for."""

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.memory.address + self.offset_bytes

    def tensor(self) -> torch.Tensor:
        """The elements as a flat tensor over the same memory. Wait for the ticket first."""
        end = self.offset_bytes + self.num_elements * self.dtype.itemsize
        return torch.frombuffer(self.memory.view[self.offset_bytes : end], dtype=self.dtype)

    def is_done(self) -> bool:
        """Whether `wait` would not block. May block: no."""
        return self.striped is None or self.striped.is_done()

    def wait(self) -> None:
        """Wait for the request; its memory is the caller's again when this ends. Twice is fine.

        Raises:
            StorageError: it failed. A failed write leaves the block torn.
            Corrupt: what was read is not what was written.
        """
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> StorageError | None:
        """As `wait`, but gives the error back: for cleaning up after another one."""
        if self.striped is None:
            return None
        error = self.striped.settle()
        if self.ended is not None:
            self.ended(self, error)
        return error


def wait_for(tickets: Sequence[StoreTicket | StripedTicket]) -> None:
    """Wait for all of several requests, and raise the first error after the last has ended."""
    errors = [error for ticket in tickets if (error := ticket.settle()) is not None]
    if errors:
        raise errors[0]


def dtype_of(part: Part, compute_format: ComputeFormat) -> torch.dtype:
    """Of the elements of a part."""
    if part is Part.LO16:
        return torch.int16
    if part.bytes_per_parameter == 4:
        return torch.float32
    return torch.bfloat16 if compute_format is ComputeFormat.BF16 else torch.float16


def checked_memory(
    what: str, memory: RamBuffer | None, offset_bytes: int, nbytes: int
) -> RamBuffer:
    """Refuse memory that is not there, not aligned, or too small for the pages of a request.

    Raises:
        ScheduleError: so that nothing outside the lease is ever touched.
    """
    if memory is None:
        raise bug(f"{what} lies on SSD and was read without memory to read it to")
    room_bytes = whole_pages(memory.nbytes) - offset_bytes
    if (memory.address + offset_bytes) % ALIGNMENT_BYTES or offset_bytes < 0 or room_bytes < nbytes:
        raise bug(
            f"{what} needs {nbytes} bytes of memory on a page boundary; {memory.nbytes} bytes at "
            f"{memory.address:#x} were given, to be used from {offset_bytes}"
        )
    return memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounters:
    """SSD traffic of a store since it was made. What stays in RAM causes none."""

    read_bytes: int = 0
    written_bytes: int = 0
    verified_bytes: int = 0
    """Of the bytes read, those compared with their checksums."""

    def since(self, before: "StoreCounters") -> "StoreCounters":
        """What was added after an earlier look at the same store."""
        return StoreCounters(
            read_bytes=self.read_bytes - before.read_bytes,
            written_bytes=self.written_bytes - before.written_bytes,
            verified_bytes=self.verified_bytes - before.verified_bytes,
        )


class Tally:
    """Adds up counters. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = StoreCounters()

    @property
    def counters(self) -> StoreCounters:
        """The sums so far."""
        with self._lock:
            return self._counters

    def add(self, *, read_bytes: int = 0, written_bytes: int = 0, verified_bytes: int = 0) -> None:
        """Count one request."""
        with self._lock:
            before = self._counters
            self._counters = StoreCounters(
                read_bytes=before.read_bytes + read_bytes,
                written_bytes=before.written_bytes + written_bytes,
                verified_bytes=before.verified_bytes + verified_bytes,
            )
