"""The engines that move real bytes: io_uring and threads, both in native code.

Owns the Python face of `lohan._native.IoEngine`: opening files (direct, or buffered where the
filesystem refuses), and turning outcomes into exceptions. Queueing, retries and byte counts are
native. Called through the `IoEngine` protocol.
"""

import contextlib
import errno
import os
from dataclasses import dataclass, field, fields

from lohan import _native
from lohan.errors import HardwareError, LohanError, bug
from lohan.ssd.engines.engine import (
    Access,
    DriveCounters,
    DriveId,
    DriveSettings,
    IoFile,
    Mixing,
    Operation,
    Priority,
    Ticket,
    closed_engine_error,
    refuse_unaligned,
)
from lohan.ssd.engines.storage_errors import short_transfer, storage_error, storage_errors

# A wait is cut into stretches so that Ctrl-C is seen; the ticket itself is not affected by it.
_WAIT_STRETCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFile:
    """A file of a native engine."""

    path: str
    drive: DriveId
    access: Access
    opened: _native.OpenFile
    engine: "NativeEngine" = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTicket:
    """A request of a native engine, with what its error message will need."""

    operation: Operation
    path: str
    offset_bytes: int
    asked_bytes: int
    native: _native.IoTicket


class NativeEngine:
    """`IoEngine` over native threads that make progress without the interpreter's lock.

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
        """Add a queue and the threads (or the ring) that serve it."""
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

    def create_file(self, path: str, *, drive: DriveId) -> NativeFile:
        """Make a file, private to the user, that did not exist; direct where possible."""
        return self._open(path, os.O_CREAT | os.O_EXCL, drive)

    def open_file(self, path: str, *, drive: DriveId) -> NativeFile:
        """Open a file that exists; direct where possible."""
        return self._open(path, 0, drive)

    def _open(self, path: str, flags: int, drive: DriveId) -> NativeFile:
        self._refuse_after_fork()
        self._refuse_unknown_drive(drive)
        descriptor, access = open_descriptor(path, flags)
        try:
            opened = _native.OpenFile(path, descriptor, drive, access is Access.DIRECT)
        except BaseException:
            os.close(descriptor)
            raise
        return NativeFile(path=path, drive=drive, access=access, opened=opened, engine=self)

    def free_bytes(self, directory: str) -> int:
        """Space this user can still take there."""
        with storage_errors("a directory failed", directory):
            filesystem = os.statvfs(directory)
        return filesystem.f_bavail * filesystem.f_frsize

    def file_bytes(self, file: IoFile) -> int:
        """How long the file is now."""
        return os.fstat(self._descriptor(file)).st_size

    def resize(self, file: IoFile, nbytes: int) -> None:
        """Make the file `nbytes` long; what it grows by is real space. May block: yes."""
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
        """Whether the file's path still leads to it."""
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
        """Let go of the file; its descriptor closes with the last request on it."""
        self._file(file).opened.close()

    def _descriptor(self, file: IoFile) -> int:
        try:
            return self._file(file).opened.descriptor
        except RuntimeError as error:
            raise closed_engine_error(self.name, str(error)) from None

    def start_read(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> NativeTicket:
        """Read into memory. Runs on: any thread. May block: no. Owns until: the ticket is done."""
        return self._start(Operation.READ, file, offset_bytes, address, nbytes, priority)

    def start_write(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> NativeTicket:
        """Write from memory. Runs on: any thread. May block: no. Owns until: the ticket is done."""
        return self._start(Operation.WRITE, file, offset_bytes, address, nbytes, priority)

    def start_flush(self, file: IoFile) -> NativeTicket:
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
    ) -> NativeTicket:
        if operation is not Operation.FLUSH:
            refuse_unaligned(operation, file.path, offset_bytes, address, nbytes)
        opened = self._file(file).opened
        try:
            native = self._native.start(operation, opened, offset_bytes, address, nbytes, priority)
        except RuntimeError as error:
            raise closed_engine_error(self.name, str(error)) from None
        return NativeTicket(
            operation=operation,
            path=file.path,
            offset_bytes=offset_bytes,
            asked_bytes=nbytes,
            native=native,
        )

    def is_done(self, ticket: Ticket) -> bool:
        """Whether `wait` would return or raise at once. May block: no."""
        return _native_ticket(ticket).native.is_done

    def wait(self, ticket: Ticket) -> None:
        """Wait until the request is done; raise what became of it.

        Runs on: any thread. May block: yes, without the interpreter's lock.
        """
        known = _native_ticket(ticket)
        native = known.native
        if not native.is_done:
            # In a forked child nothing will ever finish it.
            self._refuse_after_fork()
        while not native.wait_for(_WAIT_STRETCH_SECONDS):
            pass
        if native.error_number == 0 and not native.is_short:
            return
        what = f"a {known.operation.name.lower()}"
        facts = {"offset_bytes": known.offset_bytes, "asked_bytes": known.asked_bytes}
        facts["got_bytes"] = native.got_bytes
        if native.is_short:
            raise short_transfer(what, path=known.path, **facts)
        raise storage_error(f"{what} failed", native.error_number, path=known.path, **facts)

    def counters(self, drive: DriveId) -> DriveCounters:
        """What this drive has done so far."""
        self._refuse_unknown_drive(drive)
        native = self._native.counters(drive)
        return DriveCounters(
            **{one.name: getattr(native, one.name) for one in fields(DriveCounters)}
        )

    def _file(self, file: IoFile) -> NativeFile:
        if isinstance(file, NativeFile) and file.engine is self:
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


def _native_ticket(ticket: Ticket) -> NativeTicket:
    if isinstance(ticket, NativeTicket):
        return ticket
    raise _foreign("ticket", ticket)


def _foreign(noun: str, thing: object) -> LohanError:
    return bug(
        f"a native engine was given a {noun} ({type(thing).__name__}) that is not its own: files "
        "and tickets belong to the engine that made them"
    )
