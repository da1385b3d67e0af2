"""The contract of an I/O engine: files on drives, requests that return tickets, and what they mean.

Owns the `IoEngine` protocol, the words it uses and the checks every engine makes before it accepts
a request. Moves no bytes. Implemented by `native_engine` (io_uring, threads), in tests by memory;
called by `striped_file`.
"""

import errno
import os
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NewType, Protocol

from lohan.errors import ConfigError, LohanError, StorageError, bug
from lohan.units import MIB

ALIGNMENT_BYTES = 4096
"""Offsets, lengths and addresses of every request are multiples of this: direct I/O needs it."""

MAX_REQUESTS = 1024

DriveId = NewType("DriveId", int)
"""A drive of one engine, in the order they were added."""


class Operation(IntEnum):
    """What a request does. The numbers are those of native/include/lohan/drive_queue.hpp."""

    READ = 0
    WRITE = 1
    FLUSH = 2


class Priority(IntEnum):
    """Which request a drive serves first: lower numbers before higher ones."""

    COMPUTE_WAITS = 0
    """Compute stands still until it is done."""
    PREFETCH = 1
    """Compute will want it soon."""
    WRITE_BACK = 2
    """Results on their way out: nothing waits but the buffer."""
    BACKGROUND = 3
    """Verification, exports, measurements."""


class Access(StrEnum):
    """How a file is open."""

    DIRECT = "direct"
    """O_DIRECT: bytes go between the drive and our memory, past the page cache."""
    BUFFERED = "buffered"
    """Through the page cache, because the filesystem refused direct I/O."""


class Mixing(StrEnum):
    """Whether a drive may have reads and writes in flight together."""

    DUPLEX = "duplex"
    """Yes: it does both at once without harm."""
    SIMPLEX = "simplex"
    """No: it gets runs of one direction, because mixing slows it down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveSettings:
    """How much of what a drive is given at a time.

    The defaults suit drives that slow down when many large blocks are in flight together, and are
    deep enough for those that do not; measuring a drive gives better ones.
    """

    block_bytes: int = 4 * MIB
    """Larger requests are cut into blocks of this size."""
    max_requests: int = 8
    """Blocks in flight."""
    max_bytes: int = 32 * MIB
    """Their bytes together. A single block always passes."""
    mixing: Mixing = Mixing.DUPLEX
    fairness_bytes: int = 256 * MIB
    """On a simplex drive: bytes of one direction before the other gets its turn."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_requests <= MAX_REQUESTS:
            raise ConfigError(
                f"max_requests is {self.max_requests}",
                why=f"a drive can have 1 to {MAX_REQUESTS} blocks in flight",
                remedy="give a number in that range; 4 to 32 is usual",
            )
        if self.block_bytes <= 0 or self.block_bytes % ALIGNMENT_BYTES or self.block_bytes >= 2**31:
            raise ConfigError(
                f"block_bytes is {self.block_bytes}",
                why=f"blocks are multiples of {ALIGNMENT_BYTES} bytes and below 2 GiB",
                remedy="give a size such as 4 MiB",
            )
        if self.max_bytes <= 0 or self.fairness_bytes <= 0:
            raise ConfigError(
                f"max_bytes is {self.max_bytes} and fairness_bytes {self.fairness_bytes}",
                why="a drive that may have no bytes in flight never finishes",
                remedy="give sizes above zero",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveCounters:
    """What a drive has done since it was added."""

    num_started: int = 0
    num_finished: int = 0
    """Requests whose ticket is done, failed ones included."""
    num_failed: int = 0
    num_blocks: int = 0
    num_continued: int = 0
    """Short transfers that were carried on to their end."""
    num_retried: int = 0
    """Attempts repeated after EINTR or EAGAIN."""
    read_bytes: int = 0
    written_bytes: int = 0
    max_in_flight: int = 0
    """Most blocks ever in flight together."""


class IoFile(Protocol):
    """An open file of one engine."""

    @property
    def path(self) -> str:
        """Where it is; used in messages."""

    @property
    def drive(self) -> DriveId:
        """The queue its requests stand in."""

    @property
    def access(self) -> Access:
        """How it is open, which may not be how it was asked for."""


class Ticket(Protocol):
    """The promise of one request. Only the engine that gave it can wait for it."""

    @property
    def asked_bytes(self) -> int:
        """How many bytes the request moves."""


class IoEngine(Protocol):
    """Positioned, asynchronous I/O with one ticket per request.

    Note "what a ticket promises". A ticket becomes done exactly once, whether the request worked or
    not. Until then the memory of the request belongs to the engine; afterwards the engine never
    touches it again. Done and good means that every byte was moved: byte counts of completions
    are checked, short transfers carried on. Any thread may wait for a ticket, any number of times,
    also after the engine was closed; each wait gives the same answer.
    """

    @property
    def name(self) -> str:
        """`io_uring`, `threads` or `memory`."""

    def add_drive(self, settings: DriveSettings) -> DriveId:
        """Add a queue with its own limits; one per physical drive."""

    def create_file(self, path: str, *, drive: DriveId) -> IoFile:
        """Make a file, private to the user, that did not exist; direct where possible."""

    def open_file(self, path: str, *, drive: DriveId) -> IoFile:
        """Open a file that exists for reading and writing; direct where possible."""

    def free_bytes(self, directory: str) -> int:
        """Space this user can still take there."""

    def file_bytes(self, file: IoFile) -> int:
        """How long the file is now."""

    def resize(self, file: IoFile, nbytes: int) -> None:
        """Make the file `nbytes` long; what it grows by is real space. May block: yes.

        Raises:
            OutOfSpace, StorageError: the space is not there; the file is as long as before.
        """

    def is_in_place(self, file: IoFile) -> bool:
        """Whether the file's path still leads to it: nobody removed or replaced it."""

    def remove_file(self, file: IoFile) -> bool:
        """Delete the file if it is still in place, and close it; says whether it was."""

    def close_file(self, file: IoFile) -> None:
        """Let go of the file. Requests already started are still carried out. Twice is fine."""

    def start_read(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> Ticket:
        """Read into memory. Runs on: any thread. May block: no. Owns until: the ticket is done."""

    def start_write(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> Ticket:
        """Write from memory. Runs on: any thread. May block: no. Owns until: the ticket is done."""

    def start_flush(self, file: IoFile) -> Ticket:
        """Make everything written by requests started before this one durable. May block: no."""

    def is_done(self, ticket: Ticket) -> bool:
        """Whether `wait` would return or raise at once. May block: no."""

    def wait(self, ticket: Ticket) -> None:
        """Wait until the request is done. May block: yes, without the interpreter's lock.

        Raises:
            ShortTransfer, OutOfSpace, StorageError: what became of the request.
        """

    def counters(self, drive: DriveId) -> DriveCounters:
        """What this drive has done so far."""

    def close(self) -> None:
        """Carry out what was started, refuse the rest. May block: yes. Twice is fine."""


def refuse_unaligned(
    operation: Operation, path: str, offset_bytes: int, address: int, nbytes: int
) -> None:
    """Refuse a request direct I/O could not serve, on every engine alike.

    Code that is tested on the memory engine or on a filesystem without direct I/O must not fail
    later on a real drive.
    """
    if (
        nbytes > 0
        and offset_bytes >= 0
        and address > 0
        and not (offset_bytes | nbytes | address) % ALIGNMENT_BYTES
        and offset_bytes + nbytes < 2**63
    ):
        return
    raise StorageError(
        f"a {operation.name.lower()} at memory address {address:#x} was refused",
        why=f"offset, length and address must be multiples of {ALIGNMENT_BYTES}, the length above "
        "zero",
        remedy="use leased buffers and round lengths up to whole pages",
        path=path,
        offset_bytes=offset_bytes,
        asked_bytes=nbytes,
        got_bytes=0,
        errno=errno.EINVAL,
    )


def closed_engine_error(name: str, reason: str) -> LohanError:
    """A request came where none can be served."""
    return bug(f"the {name} engine was given a request by process {os.getpid()}, but {reason}")
