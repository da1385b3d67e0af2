"""Files on drives and requests that return tickets: io_uring or threads, both in native code.

Owns the words of requests, the checks before one is accepted, opening files (direct, or buffered
where the filesystem refuses), turning outcomes into exceptions, and which of the two engines this
machine gets. Queueing, retries and byte counts are native. Called by `striped_file`; the engines of
tests have the same methods, and one suite judges all (tests/contract/test_io_engine_contract.py).
"""

import contextlib
import errno
import os
import pathlib
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NewType

from lohan import _native
from lohan.errors import ConfigError, HardwareError, LohanError, StorageError, bug
from lohan.ssd.engines.storage_errors import short_transfer, storage_error, storage_errors
from lohan.units import MIB

ALIGNMENT_BYTES = 4096
"""Offsets, lengths and addresses of every request are multiples of this: direct I/O needs it."""

MAX_REQUESTS = 1024
# A wait is cut into stretches so that Ctrl-C is seen; the ticket itself is not affected by it.
_WAIT_STRETCH_SECONDS = 0.5
_DISABLED_SWITCH = pathlib.Path("/proc/sys/kernel/io_uring_disabled")

DriveId = NewType("DriveId", int)
"""A drive of one engine, in the order they were added."""


def whole_pages(nbytes: int) -> int:
    """Bytes rounded up to pages, which is what moves."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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
class IoFile:
    """An open file of one engine."""

    path: str
    """Where it is; used in messages."""
    drive: DriveId
    """The queue its requests stand in."""
    access: Access
    """How it is open, which may not be how it was asked for."""
    opened: _native.OpenFile
    engine: "IoEngine" = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The promise of one request, with what its error message will need."""

    operation: Operation
    path: str
    offset_bytes: int
    asked_bytes: int
    native: _native.IoTicket


class IoEngine:
    """Positioned, asynchronous I/O: native threads make progress without the interpreter's lock.

    Note "what a ticket promises". A ticket becomes done exactly once, whether the request worked or
    not. Until then the memory of the request belongs to the engine; afterwards the engine never
    touches it again. Done and good means that every byte was moved: byte counts of completions
    are checked, short transfers carried on. Any thread may wait for a ticket, any number of times,
    also after the engine was closed; each wait gives the same answer. Only the engine that gave it
    can wait for it.

    Raises:
        OSError: io_uring was asked for and this machine does not offer it.
    """

    def __init__(self, *, is_uring: bool) -> None:
        if is_uring and (number := _native.probe_uring()):
            raise OSError(number, os.strerror(number), "io_uring_setup")
        self._native = _native.IoEngine(is_uring=is_uring)
        self.name = "io_uring" if is_uring else "threads"
        self._process_id = os.getpid()
        self._num_drives = 0

    def add_drive(self, settings: DriveSettings) -> DriveId:
        """Add a queue and the threads (or the ring) that serve it; one per physical drive."""
        try:
            number = self._native.add_drive(
                max_requests=settings.max_requests,
                max_bytes=settings.max_bytes,
                block_bytes=settings.block_bytes,
                is_simplex=settings.mixing is Mixing.SIMPLEX,
                fairness_bytes=settings.fairness_bytes,
            )
        except RuntimeError as error:
            raise closed_engine_error(self.name, str(error)) from None
        except OSError as error:
            raise HardwareError(
                f"the {self.name} engine could not serve another drive ({error})",
                why=f"the system refused the ring or the threads for {settings.max_requests} "
                "blocks in flight",
                remedy="lower max_requests, or raise the limits of this process (ulimit -l, -n, "
                "-u)",
            ) from None
        self._num_drives = max(self._num_drives, number + 1)
        return DriveId(number)

    def create_file(self, path: str, *, drive: DriveId) -> IoFile:
        """Make a file, private to the user, that did not exist; direct where possible."""
        return self._open(path, os.O_CREAT | os.O_EXCL, drive)

    def open_file(self, path: str, *, drive: DriveId) -> IoFile:
        """Open a file that exists for reading and writing; direct where possible."""
        return self._open(path, 0, drive)

    def _open(self, path: str, flags: int, drive: DriveId) -> IoFile:
        self._refuse_after_fork()
        self._refuse_unknown_drive(drive)
        descriptor, access = open_descriptor(path, flags)
        try:
            opened = _native.OpenFile(path, descriptor, drive, access is Access.DIRECT)
        except BaseException:
            os.close(descriptor)
            raise
        return IoFile(path=path, drive=drive, access=access, opened=opened, engine=self)

    def free_bytes(self, directory: str) -> int:
        """Space this user can still take there."""
        with storage_errors("a directory failed", directory):
            filesystem = os.statvfs(directory)
        return filesystem.f_bavail * filesystem.f_frsize

    def file_bytes(self, file: IoFile) -> int:
        """How long the file is now."""
        return os.fstat(self._descriptor(file)).st_size

    def resize(self, file: IoFile, nbytes: int) -> None:
        """Make the file `nbytes` long; what it grows by is real space. May block: yes.

        Raises:
            OutOfSpace, StorageError: the space is not there; the file is as long as before.
        """
        self._refuse_after_fork()
        descriptor = self._descriptor(file)
        before = os.fstat(descriptor).st_size
        if nbytes <= before:
            with storage_errors("a file kept its size", file.path):
                os.ftruncate(descriptor, nbytes)
            return
        if number := _native.reserve_space(descriptor, before, nbytes):
            # What was gained is given back, so that a refusal leaves nothing behind.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            raise storage_error(
                "space could not be reserved",
                number,
                path=file.path,
                offset_bytes=before,
                asked_bytes=nbytes - before,
                got_bytes=0,
            )

    def is_in_place(self, file: IoFile) -> bool:
        """Whether the file's path still leads to it: nobody removed or replaced it."""
        try:
            there = os.stat(file.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(os.fstat(self._descriptor(file)), there)

    def remove_file(self, file: IoFile) -> bool:
        """Delete the file if it is still in place, and close it; says whether it was."""
        self._refuse_after_fork()
        try:
            was_in_place = self.is_in_place(file)
            if was_in_place:
                os.unlink(file.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error("a file could not be deleted", error, path=file.path) from None
        finally:
            self.close_file(file)
        return was_in_place

    def close_file(self, file: IoFile) -> None:
        """Let go of the file; requests already started are still carried out. Twice is fine."""
        self._file(file).opened.close()

    def _descriptor(self, file: IoFile) -> int:
        try:
            return self._file(file).opened.descriptor
        except RuntimeError as error:
            raise closed_engine_error(self.name, str(error)) from None

    def start_read(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> Ticket:
        """Read into memory. Runs on: any thread. May block: no. Owns until: the ticket is done."""
        return self._start(Operation.READ, file, offset_bytes, address, nbytes, priority)

    def start_write(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> Ticket:
        """Write from memory. Runs on: any thread. May block: no. Owns until: the ticket is done."""
        return self._start(Operation.WRITE, file, offset_bytes, address, nbytes, priority)

    def start_flush(self, file: IoFile) -> Ticket:
        """Make everything written by requests started before this one durable. May block: no."""
        return self._start(Operation.FLUSH, file, 0, 0, 0, Priority.WRITE_BACK)

    def _start(
        self,
        operation: Operation,
        file: IoFile,
        offset_bytes: int,
        address: int,
        nbytes: int,
        priority: Priority,
    ) -> Ticket:
        if operation is not Operation.FLUSH:
            refuse_unaligned(operation, file.path, offset_bytes, address, nbytes)
        opened = self._file(file).opened
        try:
            native = self._native.start(operation, opened, offset_bytes, address, nbytes, priority)
        except RuntimeError as error:
            raise closed_engine_error(self.name, str(error)) from None
        return Ticket(
            operation=operation,
            path=file.path,
            offset_bytes=offset_bytes,
            asked_bytes=nbytes,
            native=native,
        )

    def is_done(self, ticket: Ticket) -> bool:
        """Whether `wait` would return or raise at once. May block: no."""
        return _own_ticket(ticket).native.is_done

    def wait(self, ticket: Ticket) -> None:
        """Wait until the request is done.

        Runs on: any thread. May block: yes, without the interpreter's lock.

        Raises:
            ShortTransfer, OutOfSpace, StorageError: what became of the request.
        """
        native = _own_ticket(ticket).native
        if not native.is_done:
            # In a forked child nothing will ever finish it.
            self._refuse_after_fork()
        while not native.wait_for(_WAIT_STRETCH_SECONDS):
            pass
        if native.error_number == 0 and not native.is_short:
            return
        what = f"a {ticket.operation.name.lower()}"
        facts = {"offset_bytes": ticket.offset_bytes, "asked_bytes": ticket.asked_bytes}
        facts["got_bytes"] = native.got_bytes
        if native.is_short:
            raise short_transfer(what, path=ticket.path, **facts)
        raise storage_error(f"{what} failed", native.error_number, path=ticket.path, **facts)

    def counters(self, drive: DriveId) -> _native.DriveCounters:
        """What this drive has done since it was added."""
        self._refuse_unknown_drive(drive)
        return self._native.counters(drive)

    def _file(self, file: object) -> IoFile:
        if isinstance(file, IoFile) and file.engine is self:
            return file
        raise _foreign("file", file)

    def _refuse_after_fork(self) -> None:
        if os.getpid() != self._process_id:
            raise closed_engine_error(self.name, "it belongs to the process this one forked from")

    def _refuse_unknown_drive(self, drive: DriveId) -> None:
        if not 0 <= drive < self._num_drives:
            raise bug(
                f"the {self.name} engine was asked for drive {drive}, and it has "
                f"{self._num_drives} drives, counted from 0"
            )

    def replace_result(self, drive: DriveId, nth: int, result: int) -> None:
        """Test seam: the N-th attempt from now (1 is the next) ends with `result` instead.

        `result` is a byte count or minus an errno, as the kernel would give it.
        """
        self._native.replace_result(drive, nth, result)

    def close(self) -> None:
        """Carry out what was started, then end the threads. May block: yes. Twice is fine."""
        try:
            self._native.close()
        except RuntimeError as error:
            raise closed_engine_error(self.name, str(error)) from None


def open_descriptor(path: str, flags: int) -> tuple[int, Access]:
    """Open for reading and writing, never through a symbolic link; direct, else buffered.

    Raises:
        StorageError: the file cannot be opened either way.
    """
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    with storage_errors("a file could not be opened", path):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), Access.DIRECT
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Some kernels make the file before they refuse the flag.
            if flags & os.O_EXCL and os.path.exists(path):
                flags &= ~os.O_EXCL
            return os.open(path, flags, 0o600), Access.BUFFERED


def _own_ticket(ticket: object) -> Ticket:
    if isinstance(ticket, Ticket):
        return ticket
    raise _foreign("ticket", ticket)


def _foreign(noun: str, thing: object) -> LohanError:
    return bug(
        f"a native engine was given a {noun} ({type(thing).__name__}) that is not its own: files "
        "and tickets belong to the engine that made them"
    )


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


def choose_engine() -> tuple[IoEngine, str]:
    """Return the best engine of this machine and the reason: io_uring, else threads."""
    try:
        return IoEngine(is_uring=True), "io_uring: the kernel offers it"
    except OSError as error:
        refusal = explain_uring_refusal(error.errno or errno.EIO)
        return IoEngine(is_uring=False), f"threads: {refusal}"


def explain_uring_refusal(number: int) -> str:
    """Say why io_uring does not work, from the errno of its set-up call."""
    if not _native.is_uring_compiled_in():
        return "this build has no io_uring, the kernel headers it was compiled with lacked it"
    said = f"io_uring_setup said errno {number} ({os.strerror(number)})"
    if number == errno.ENOSYS:
        return f"the kernel has no io_uring; {said}"
    if number == errno.EPERM:
        switch = _read_switch()
        if switch not in (None, "0"):
            return f"io_uring is switched off, kernel.io_uring_disabled is {switch}; {said}"
        return f"a sandbox (seccomp, a container) forbids io_uring; {said}"
    if number == errno.ENOMEM:
        return f"the locked-memory limit (ulimit -l) is too low for io_uring; {said}"
    return said


def _read_switch() -> str | None:
    try:
        return _DISABLED_SWITCH.read_text().strip()
    except OSError:
        return None
