"""Directories in which a model is written before it gets its name, and those left by a kill.

Owns their names, the lock that tells one in use from a leftover, and removing leftovers. Called by
whoever writes a model, when a run begins, and by `lohan clean`.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lohan.held_locks import hold, let_go
from lohan.ssd.engines.storage_errors import storage_errors

_PARTIAL = ".partial-"
_RANDOM_BYTES = 4


@contextlib.contextmanager
def partial_directory(out: Path, is_merge: bool) -> Iterator[Path]:
    """A hidden directory on the filesystem of `out`; removed if it is not renamed away.

    Leftovers of exports to the same place that were cut off go first.
    """
    place = out if is_merge else out.parent
    remove_left(out, place)
    partial = place / f".{out.name}{_PARTIAL}{secrets.token_hex(_RANDOM_BYTES)}"
    with storage_errors("an export cannot be begun", partial):
        partial.mkdir()
        lock = hold(_opened(partial))
    try:
        with contextlib.suppress(OSError):  # without locks nobody takes it for a leftover
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        let_go(lock)


def remove_left(out: Path, place: Path | None = None) -> None:
    """Remove what exports to `out` left in it, or in another `place`, when they were killed.

    Only directories with such a name, of this user, that nobody has locked: whoever writes into one
    holds its lock, and a killed process holds none.
    """
    name = Path(os.path.realpath(out)).name
    place = out if place is None else place
    own = re.compile(rf"\.{re.escape(name)}{re.escape(_PARTIAL)}[0-9a-f]{{{2 * _RANDOM_BYTES}}}")
    for path in sorted(place.iterdir()) if place.is_dir() else ():
        if own.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):  # it is in use, gone by now, or cannot be locked here
            descriptor = hold(_opened(path))
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                let_go(descriptor)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
