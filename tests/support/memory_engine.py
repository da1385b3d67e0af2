"""An engine whose drives are main memory: the judge of the others, and their stand-in in tests.

Owns the obvious implementation of the `IoEngine` contract: every request is carried out at once, in
the calling thread, on a bytearray. Touches no disk.
"""

import ctypes
import errno
import threading
from dataclasses import dataclass, field

from lohan.errors import ScheduleError, StorageError
from lohan.ssd.engines.engine import (
    Access,
    DriveId,
    DriveSettings,
    IoFile,
    Operation,
    Priority,
    Ticket,
    closed_engine_error,
    refuse_unaligned,
)
from lohan.ssd.engines.storage_errors import short_transfer, storage_error

_ENDLESS_BYTES = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFile:
    """A file that exists in its engine only."""

    path: str
    drive: DriveId
    access: Access = Access.DIRECT
    content: bytearray


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTicket:
    """A request that is over already."""

    asked_bytes: int
    error: StorageError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounters:
    """As `_native.DriveCounters`."""

    num_started: int
    num_finished: int
    num_failed: int
    num_blocks: int
    num_continued: int = 0
    num_retried: int = 0
    read_bytes: int
    written_bytes: int
    max_in_flight: int


@dataclass(slots=True, kw_only=True)
class _Counts:
    num_started: int = 0
    num_failed: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class _Drive:
    settings: DriveSettings
    counts: _Counts = field(default_factory=_Counts)


class MemoryEngine:
    """`IoEngine` on bytearrays; requests are done when `start_read` and `start_write` return.

    `capacity_bytes` bounds all files together: beyond it there is no space, as on a drive.
    """

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._contents: dict[str, bytearray] = {}
        self._open_paths: list[str] = []
        self._drives: list[_Drive] = []
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """`memory`."""
        return "memory"

    def add_drive(self, settings: DriveSettings) -> DriveId:
        """Add a drive; its settings are kept and have no effect."""
        with self._lock:
            self._refuse_if_closed()
            self._drives.append(_Drive(settings=settings))
            return DriveId(len(self._drives) - 1)

    def create_file(self, path: str, *, drive: DriveId) -> MemoryFile:
        """Make a file that did not exist."""
        with self._lock:
            if path in self._contents:
                raise storage_error("a file could not be opened", errno.EEXIST, path=path)
            content = self._contents[path] = bytearray()
            self._open_paths.append(path)
            return MemoryFile(path=path, drive=drive, content=content)

    def open_file(self, path: str, *, drive: DriveId) -> MemoryFile:
        """Open a file this engine made before."""
        with self._lock:
            if path not in self._contents:
                raise storage_error("a file could not be opened", errno.ENOENT, path=path)
            self._open_paths.append(path)
            return MemoryFile(path=path, drive=drive, content=self._contents[path])

    def free_bytes(self, directory: str) -> int:
        """Space left of the capacity; as good as endless without one."""
        with self._lock:
            return self._free_bytes()

    def file_bytes(self, file: IoFile) -> int:
        """How long the file is now."""
        return len(_memory_file(file).content)

    def resize(self, file: IoFile, nbytes: int) -> None:
        """Cut the file, or grow it with zeros."""
        content = _memory_file(file).content
        with self._lock:
            missing_bytes = nbytes - len(content)
            if missing_bytes > self._free_bytes():
                raise storage_error(
                    "space could not be reserved",
                    errno.ENOSPC,
                    path=file.path,
                    offset_bytes=len(content),
                    asked_bytes=missing_bytes,
                    got_bytes=0,
                )
            del content[nbytes:]
            content.extend(bytes(max(0, missing_bytes)))

    def is_in_place(self, file: IoFile) -> bool:
        """Whether the path still leads to this content."""
        with self._lock:
            return self._contents.get(file.path) is _memory_file(file).content

    def remove_file(self, file: IoFile) -> bool:
        """Forget the content if it is still in place, and close the file; says whether it was."""
        was_in_place = self.is_in_place(file)
        with self._lock:
            if was_in_place:
                del self._contents[file.path]
        self.close_file(file)
        return was_in_place

    def close_file(self, file: IoFile) -> None:
        """Let go of the file; its content stays for `open_file`. Twice is fine."""
        with self._lock:
            if file.path in self._open_paths:
                self._open_paths.remove(file.path)

    def start_read(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> MemoryTicket:
        """Copy out of the file, now."""
        return self._transfer(Operation.READ, file, offset_bytes, address, nbytes)

    def start_write(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> MemoryTicket:
        """Copy into the file, now. Past its end the file grows."""
        return self._transfer(Operation.WRITE, file, offset_bytes, address, nbytes)

    def start_flush(self, file: IoFile) -> MemoryTicket:
        """Nothing to make durable."""
        with self._lock:
            self._refuse_if_closed(file)
            self._drives[file.drive].counts.num_started += 1
        return MemoryTicket(asked_bytes=0, error=None)

    def is_done(self, ticket: Ticket) -> bool:
        """Always: requests end where they start."""
        _memory_ticket(ticket)
        return True

    def wait(self, ticket: Ticket) -> None:
        """Raise what became of the request. May block: no."""
        error = _memory_ticket(ticket).error
        if error is not None:
            raise error

    def counters(self, drive: DriveId) -> MemoryCounters:
        """What this drive has done so far."""
        with self._lock:
            counts = self._drives[drive].counts
            return MemoryCounters(
                num_started=counts.num_started,
                num_finished=counts.num_started,
                num_failed=counts.num_failed,
                num_blocks=counts.num_started,
                read_bytes=counts.read_bytes,
                written_bytes=counts.written_bytes,
                max_in_flight=min(counts.num_started, 1),
            )

    def close(self) -> None:
        """Refuse what comes later. Twice is fine."""
        with self._lock:
            self._is_closed = True

    def _free_bytes(self) -> int:
        if self._capacity_bytes is None:
            return _ENDLESS_BYTES
        return self._capacity_bytes - sum(len(content) for content in self._contents.values())

    def _refuse_if_closed(self, file: IoFile | None = None) -> None:
        if self._is_closed:
            raise closed_engine_error(self.name, "it is closed")
        if file is not None and file.path not in self._open_paths:
            raise closed_engine_error(self.name, "the file is closed")

    def _transfer(
        self, operation: Operation, file: IoFile, offset_bytes: int, address: int, nbytes: int
    ) -> MemoryTicket:
        refuse_unaligned(operation, file.path, offset_bytes, address, nbytes)
        content = _memory_file(file).content
        with self._lock:
            self._refuse_if_closed(file)
            counts = self._drives[file.drive].counts
            counts.num_started += 1
            if operation is Operation.WRITE:
                missing_bytes = offset_bytes + nbytes - len(content)
                content.extend(bytes(max(0, missing_bytes)))
                content[offset_bytes : offset_bytes + nbytes] = ctypes.string_at(address, nbytes)
                counts.written_bytes += nbytes
                return MemoryTicket(asked_bytes=nbytes, error=None)
            got = bytes(content[offset_bytes : offset_bytes + nbytes])
            ctypes.memmove(address, got, len(got))
            counts.read_bytes += len(got)
            if len(got) == nbytes:
                return MemoryTicket(asked_bytes=nbytes, error=None)
            counts.num_failed += 1
            error = short_transfer(
                "a read",
                path=file.path,
                offset_bytes=offset_bytes,
                asked_bytes=nbytes,
                got_bytes=len(got),
            )
            return MemoryTicket(asked_bytes=nbytes, error=error)


def _memory_file(file: IoFile) -> MemoryFile:
    if isinstance(file, MemoryFile):
        return file
    raise _foreign("file", file)


def _memory_ticket(ticket: Ticket) -> MemoryTicket:
    if isinstance(ticket, MemoryTicket):
        return ticket
    raise _foreign("ticket", ticket)


def _foreign(noun: str, thing: object) -> ScheduleError:
    return ScheduleError(
        f"the memory engine was given a {noun} of type {type(thing).__name__}",
        why="files and tickets belong to the engine that made them",
        remedy="use the engine that gave it",
    )
