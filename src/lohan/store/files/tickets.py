"""What a store gives back for a request, and what it needs of a piece of memory.

Owns the ticket all stores of this folder share. Waiting is the store's: it knows what an error
means for its books. Made by the stores; held by whoever asked.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from lohan.errors import bug
from lohan.ssd import ALIGNMENT_BYTES, Operation, StripedTicket
from lohan.store.format.parts import ComputeFormat, Part


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

    what: str
    """Block, part and range, for messages."""
    operation: Operation
    memory: RamBuffer
    offset_bytes: int
    """Where in the memory the bytes are."""
    nbytes: int
    """Whole pages moved."""
    num_elements: int
    """Elements that count; the rest of the last page is padding."""
    dtype: torch.dtype
    key: object
    """What the store asked itself for: a block, an activation."""
    striped: StripedTicket | None
    """The request to the SSDs; None if there was none."""

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.memory.address + self.offset_bytes

    def tensor(self) -> torch.Tensor:
        """The elements as a flat tensor over the same memory. Wait for the ticket first."""
        return tensor_over(self.memory, self.offset_bytes, self.num_elements, self.dtype)


def tensor_over(
    memory: RamBuffer, offset_bytes: int, num_elements: int, dtype: torch.dtype
) -> torch.Tensor:
    """A flat tensor over part of a piece of memory, without a copy."""
    nbytes = num_elements * dtype.itemsize
    return torch.frombuffer(memory.view[offset_bytes : offset_bytes + nbytes], dtype=dtype)


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
    room_bytes = -(-memory.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES - offset_bytes
    if (memory.address + offset_bytes) % ALIGNMENT_BYTES or offset_bytes < 0 or room_bytes < nbytes:
        raise bug(
            f"{what} needs {nbytes} bytes of memory on a page boundary; {memory.nbytes} bytes at "
            f"{memory.address:#x} were given, to be used from {offset_bytes}"
        )
    return memory
