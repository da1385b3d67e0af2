"""Directories that runs left in SSD directories, as they are found, without touching them.

Owns telling a run's directory from anything else of that name, and who holds it. What the files in
it mean, and which directories belong together, is known to `lohan.store`. A directory counts only
if it is as `RunDirectories` makes them; everything else is left alone, and said.
"""

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lohan.errors import StorageError
from lohan.ssd.engines.storage_errors import storage_error
from lohan.ssd.runs.run_directory import LOCK_NAME, PREFIX, RUN_ID, describe_holder

_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the filesystem
_LONGEST_NOTE_BYTES = 4096


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
            return describe_holder(descriptor), _note(descriptor, is_held=True)
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
