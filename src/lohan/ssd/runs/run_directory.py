"""The places of one run: `<ssd directory>/lohan-<run id>/`, private and locked.

Owns making, locking, taking over and removing these directories. What lies in them belongs to
`striped_file` and higher parts. Two runs with different ids never meet; two with the same id are
told who holds it. The lock ends with the process, however it ends.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Sequence

from lohan.durable_files import sync_directory
from lohan.errors import ConfigError, StorageError
from lohan.held_locks import hold, let_go
from lohan.ssd.engines.storage_errors import storage_error, storage_errors

PREFIX = "lohan-"
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LOCK_NAME = "lock"


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
        holder = describe_holder(descriptor)
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


def describe_holder(descriptor: int) -> str:
    """Say who holds a run, from the note in its lock."""
    try:
        note = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {note['pid']} on {note['host']} since {note['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
