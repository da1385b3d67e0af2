"""The places of one run: `<ssd directory>/lohan-<run id>/`, private and locked.

Owns making, locking, taking over and removing these directories, telling those that runs left from
anything else of that name, and who holds one. What lies in them belongs to `striped_file` and
higher parts; which belong together is known to `lohan.store`. Two runs with different ids never
meet; two with the same id are told who holds it. The lock ends with the process, however it ends.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lohan.durable_files import sync_directory
from lohan.errors import ConfigError, StorageError
from lohan.held_locks import hold, let_go
from lohan.ssd.engines.storage_errors import storage_error, storage_errors

PREFIX = "lohan-"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOCK_NAME = "lock"
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the filesystem
_LONGEST_NOTE_BYTES = 4096


class RunDirectories:
    """The directories of one run, one per SSD, locked until `close`."""

    def __init__(self, run_id: str, paths: tuple[str, ...], locks: tuple[int, ...]) -> None:
        self.run_id = run_id
        self.paths = paths
        self._locks = list(locks)
        self._process_id = os.getpid()

    @classmethod
    def create(cls, parents: Sequence[str | os.PathLike[str]], run_id: str) -> "RunDirectories":
        """Make the directories of a run that does not exist yet. What fails half-way is undone.

        Raises:
            ConfigError: the run id cannot be part of a file name.
            StorageError: the run exists, or a directory cannot be made.
        """
        return cls._enter(parents, run_id, is_new=True)

    @classmethod
    def attach(cls, parents: Sequence[str | os.PathLike[str]], run_id: str) -> "RunDirectories":
        """Take over the directories of a run that was left.

        Raises:
            StorageError: they are missing, not this user's, or held by a process that runs.
        """
        return cls._enter(parents, run_id, is_new=False)

    @classmethod
    def _enter(
        cls, parents: Sequence[str | os.PathLike[str]], run_id: str, *, is_new: bool
    ) -> "RunDirectories":
        if not RUN_ID.fullmatch(run_id):
            raise ConfigError(
                f"{run_id!r} is not a run id",
                why="it becomes part of a directory name",
                remedy="use up to 64 letters, digits, dots, dashes and underscores",
            )
        if not parents:
            raise ConfigError(
                f"run {run_id} has no SSD directory",
                why="it needs a place",
                remedy="name one directory per SSD",
            )
        paths: list[str] = []
        locks: list[int] = []
        try:
            for parent in parents:
                path = os.path.join(os.path.realpath(parent), f"{PREFIX}{run_id}")
                _refuse_repeated(path, paths)
                if is_new:
                    _make(path)
                else:
                    _refuse_foreign(path)
                paths.append(path)
                locks.append(_lock(path, run_id, is_new=is_new))
        except BaseException:
            cls(run_id, tuple(paths), tuple(locks)).close(should_delete=is_new)
            raise
        return cls(run_id, tuple(paths), tuple(locks))

    def sync(self) -> None:
        """Make the entries of the directories durable. May block: yes.

        Raises:
            StorageError: a directory is gone or cannot be flushed.
        """
        for path in self.paths:
            with storage_errors("a run directory failed", path):
                sync_directory(path)

    def close(self, *, should_delete: bool = False) -> None:
        """Unlock. With `should_delete` the lock files go, and directories that are then empty.

        A directory with anything else in it stays: this run did not make that. Twice is fine. In a
        process forked from the one that holds the run nothing is unlocked or deleted.
        """
        if os.getpid() != self._process_id:
            self._locks = []
            return
        for descriptor, path in zip(self._locks, self.paths, strict=False):
            if should_delete and _is_lock_of(descriptor, path):
                os.unlink(os.path.join(path, LOCK_NAME))
            let_go(descriptor)
        if should_delete and (self._locks or self.paths):
            for path in self.paths:
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        self._locks = []
        if should_delete:
            self.paths = ()


def _make(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        raise StorageError(
            "a run directory exists already",
            why="an earlier run made it, and its files may be the only copy of a model",
            remedy="resume that run, use another run id, or remove the directory yourself",
            path=path,
            errno=errno.EEXIST,
        ) from None
    except OSError as error:
        raise storage_error("a run directory could not be made", error, path=path) from None


def _refuse_foreign(path: str) -> None:
    with storage_errors("a run directory is missing", path):
        status = os.lstat(path)
    if not os.path.isdir(path) or os.path.islink(path) or status.st_uid != os.geteuid():
        raise StorageError(
            "a run directory was not taken over",
            why="it is not a directory of this user",
            remedy="check who made it, and the SSD directories you gave",
            path=path,
            errno=errno.EPERM,
        )


def _refuse_repeated(path: str, paths: Sequence[str]) -> None:
    if path in paths:
        raise ConfigError(
            f"the SSD directory {os.path.dirname(path)} is given twice",
            why="a run needs a place of its own per SSD, and links to one place are one place",
            remedy="name each SSD once",
        )


def _lock(directory: str, run_id: str, *, is_new: bool) -> int:
    path = os.path.join(directory, LOCK_NAME)
    with storage_errors("a run could not be locked", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_lock_of(descriptor, directory):
            # The holder removed the run between our opening and our locking of the file.
            raise BlockingIOError(errno.EWOULDBLOCK, "the run is being removed")
        note = {
            "run_id": run_id,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(note).encode(), 0)
    except BlockingIOError:
        holder = _describe_holder(descriptor)
        os.close(descriptor)
        raise StorageError(
            f"run {run_id} is held by {holder}",
            why="two processes writing the same files would destroy them",
            remedy="wait for it or stop it, or use another run id",
            path=path,
            errno=errno.EWOULDBLOCK,
        ) from None
    except OSError as error:
        if is_new:
            # A full disk has room for an empty file but not for the note: leave nothing behind.
            with contextlib.suppress(OSError):
                os.unlink(path)
        os.close(descriptor)
        raise storage_error("a run could not be locked", error, path=path) from None
    except BaseException:
        os.close(descriptor)
        raise
    return hold(descriptor)


def _is_lock_of(descriptor: int, directory: str) -> bool:
    try:
        there = os.stat(os.path.join(directory, LOCK_NAME), follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _describe_holder(descriptor: int) -> str:
    """Say who holds a run, from the note in its lock."""
    try:
        note = json.loads(os.pread(descriptor, _LONGEST_NOTE_BYTES, 0))
        return f"process {note['pid']} on {note['host']} since {note['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftFile:
    """An entry of a run's directory."""

    name: str
    is_plain: bool
    """A regular file of this user: no link, no directory, no pipe."""
    disk_bytes: int
    changed_seconds: float
    """When it was last written, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """The directory of a run in one SSD directory."""

    run_id: str
    parent: str
    """The SSD directory, links resolved."""
    path: str
    files: tuple[LeftFile, ...]
    changed_seconds: float
    """When the directory or a file in it last changed."""
    holder: str | None
    """Who holds the run now; None: nobody."""
    note: Mapping[str, object]
    """What the last holder wrote into the lock; empty if it was stopped before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundParts:
    """What is in some SSD directories."""

    parts: tuple[RunPart, ...]
    remarks: tuple[str, ...]
    """What could not be looked at, and what looks like a run and is none."""


def find_run_parts(parents: Sequence[str | os.PathLike[str]]) -> FoundParts:
    """Look for runs in SSD directories. A directory given twice is looked at once.

    Raises:
        StorageError: none of the directories can be read.
    """
    parts: list[RunPart] = []
    remarks: list[str] = []
    failed: list[StorageError] = []
    seen = dict.fromkeys(os.path.realpath(parent) for parent in parents)
    for parent in seen:
        try:
            with os.scandir(parent) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError as error:
            failed.append(storage_error("an SSD directory cannot be read", error, path=parent))
            remarks.append(f"{parent} cannot be read: {error.strerror}")
            continue
        for name in names:
            if name.startswith(PREFIX) and RUN_ID.fullmatch(name.removeprefix(PREFIX)):
                found = _look_at(parent, name)
                if isinstance(found, RunPart):
                    parts.append(found)
                elif found:
                    remarks.append(f"{os.path.join(parent, name)} is left alone: {found}")
    if failed and len(failed) == len(seen):
        raise failed[0]
    return FoundParts(parts=tuple(parts), remarks=tuple(remarks))


def _look_at(parent: str, name: str) -> RunPart | str | None:
    """Return a run's directory, or why it is none; None if nothing about it is worth a word."""
    path = os.path.join(parent, name)
    run_id = name.removeprefix(PREFIX)
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            return "it is a symbolic link, and lohan makes none"
        if not stat.S_ISDIR(status.st_mode):
            return None
        if status.st_uid != os.geteuid():
            return "it belongs to another user"
        files = _files_in(path)
        holder, note = _lock_state(path)
    except FileNotFoundError:
        return None  # removed while we looked
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except ValueError:
        return "its lock was not written by lohan"
    if note is None and (files or stat.S_IMODE(status.st_mode) != 0o700):
        return "it has no lock file, so it is not known to be a run's"
    if note and note.get("run_id") != run_id:
        return f"its lock is of another run ({note.get('run_id')!r})"
    return RunPart(
        run_id=run_id,
        parent=parent,
        path=path,
        files=files,
        changed_seconds=max([status.st_mtime, *(file.changed_seconds for file in files)]),
        holder=holder,
        note=note or {},
    )


def _files_in(path: str) -> tuple[LeftFile, ...]:
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # a scratch file of a run that goes on
                status = entry.stat(follow_symlinks=False)
                found.append(
                    LeftFile(
                        name=entry.name,
                        is_plain=stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid(),
                        disk_bytes=status.st_blocks * _BLOCK_BYTES,
                        changed_seconds=status.st_mtime,
                    )
                )
    return tuple(sorted(found, key=lambda file: file.name))


def _lock_state(directory: str) -> tuple[str | None, Mapping[str, object] | None]:
    """Who holds a run, and the note in its lock; no note at all if there is no lock.

    The lock is taken shared for an instant: a run that is made or resumed in that very instant is
    told that somebody holds it, and can be started again.

    Raises:
        ValueError: the lock is something lohan did not write.
    """
    path = os.path.join(directory, LOCK_NAME)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("a link") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no file")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _describe_holder(descriptor), _note(descriptor, is_held=True)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return None, _note(descriptor, is_held=False)
    finally:
        os.close(descriptor)


def _note(descriptor: int, *, is_held: bool) -> Mapping[str, object]:
    content = os.pread(descriptor, _LONGEST_NOTE_BYTES, 0)
    if not content:
        return {}  # stopped between making the lock and writing into it
    try:
        note = json.loads(content)
    except ValueError:
        if is_held:
            return {}  # being written now
        raise
    if not isinstance(note, dict):
        raise ValueError("no note")
    return note
