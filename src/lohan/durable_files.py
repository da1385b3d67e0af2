"""Files and folders that are there whole or not at all, also after a power cut.

Owns the order of write, fsync and rename, and permissions. Used for everything a resume relies on
(such files are private to the user), and for every file that commands were told to write.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

from lohan.errors import ConfigError

# Of Linux: paths are relative to the working directory; two names are swapped.
_HERE, _EXCHANGE = -100, 2
_ENDING = ".lohan-partial"


def write_text(path: pathlib.Path, text: str) -> None:
    """Replace a file in one instant. May block: yes, on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_new(temporary, text.encode())
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_new(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file of a name that is ours, durably. May block: yes."""
    descriptor = new_file(path)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_file(path: str | os.PathLike[str]) -> int:
    """Make an empty file of a name that is ours, private and never through a link.

    What has the name, a leftover or a link that somebody put there, goes; its target stays.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def write_json(path: pathlib.Path, found: Any) -> None:
    """Write JSON; numbers are read back with the same bits."""
    write_text(path, json.dumps(found, indent=1) + "\n")


def publish_directory(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Give a finished directory its name. What stood there under that name is removed.

    A reader finds the one or the other whole at every instant, where the filesystem can exchange
    two names. Where it cannot, a crash may leave the former one under another name for a moment;
    `restore_directory` puts it back. May block: yes, on the disk.
    """
    sync_tree(temporary)
    doomed = _former(path)
    if not path.exists():
        # What is whole under another name outlives this rename.
        os.rename(temporary, path)
    elif exchange_names(temporary, path):
        sync_directory(path.parent)
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        os.rename(temporary, path)
    sync_directory(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def sync_tree(path: pathlib.Path) -> None:
    """Make all files of a directory and below durable, with their names. May block: yes."""
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(os.path.join(folder, name))
        sync_directory(pathlib.Path(folder))


def restore_directory(path: pathlib.Path) -> None:
    """Give a directory its name back that a crash within `publish_directory` took from it."""
    former = _former(path)
    if former.is_dir() and not path.exists():
        os.rename(former, path)
        sync_directory(path.parent)


def _former(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.old")


def exchange_names(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Swap two names in one instant; False where the system or the filesystem cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    result = rename(
        ctypes.c_int(_HERE), os.fsencode(one), ctypes.c_int(_HERE), os.fsencode(other),
        ctypes.c_uint(_EXCHANGE),
    )  # fmt: skip
    if result == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def sync_file(path: pathlib.Path) -> None:
    """Make a file that others write durable as far as it goes, with its name. None is fine."""
    if path.exists():
        _sync(path)
        sync_directory(path.parent)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable."""
    _sync(path, os.O_DIRECTORY)


def _sync(path: str | os.PathLike[str], flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: pathlib.Path, text: str, *, is_private: bool = False) -> None:
    """Write a file that a user asked for, whole or not at all; private: for the user alone.

    What must outlive a power cut is written by `write_text`.

    Raises:
        ConfigError: if it cannot be written; what was there before is then untouched.
    """
    partial = None
    try:
        # A link stays a link: the file it names is replaced.
        path = path.resolve()
        prefix = f".{path.name}."
        _remove_left(path.parent, prefix)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=prefix, suffix=_ENDING, delete=False
        ) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            partial = file.name
            file.write(text)
            file.flush()
            if not is_private:
                # A temporary file is private; what the user asked for gets the usual permissions.
                mask = os.umask(0)
                os.umask(mask)
                os.chmod(partial, 0o666 & ~mask)
            os.replace(partial, path)
    except BaseException as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        if not isinstance(error, OSError):
            raise
        raise ConfigError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            remedy="give a path in a writable directory with room",
        ) from error


def _remove_left(folder: pathlib.Path, prefix: str) -> None:
    """Remove what writers that were killed left behind; one that still writes holds a lock."""
    for name in os.listdir(folder):
        if name.startswith(prefix) and name.endswith(_ENDING):
            with contextlib.suppress(OSError), open(folder / name, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)
