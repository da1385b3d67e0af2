"""Small files that are there whole or not at all, also after a power cut.

Owns the order of write, fsync and rename. Used for everything a resume relies on; such files are
private to the user.
"""

import ctypes
import errno
import json
import os
import pathlib
import shutil
from typing import Any

# Of Linux: paths are relative to the working directory; two names are swapped.
_HERE, _EXCHANGE = -100, 2


def write_text(path: pathlib.Path, text: str) -> None:
    """Replace a file in one instant. May block: yes, on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8", opener=_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def _private(path: str, flags: int) -> int:
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
    for folder, _, names in os.walk(temporary):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(pathlib.Path(folder))
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


def sync_directory(path: pathlib.Path) -> None:
    """Make the names in a directory durable."""
    _sync(path, os.O_DIRECTORY)


def _sync(path: pathlib.Path, flags: int = 0) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
