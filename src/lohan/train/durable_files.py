"""Small files that are there whole or not at all, also after a power cut.

Owns the order of write, fsync and rename. Used for everything a resume relies on.
"""

import json
import os
import pathlib
import shutil
from typing import Any


def write_text(path: pathlib.Path, text: str) -> None:
    """Replace a file in one instant. May block: yes, on the disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_json(path: pathlib.Path, found: Any) -> None:
    """Write JSON; numbers are read back with the same bits."""
    write_text(path, json.dumps(found, indent=1) + "\n")


def publish_directory(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Give a finished directory its name. What stood there under that name is removed.

    May block: yes, on the disk.
    """
    for folder, _, names in os.walk(temporary):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(pathlib.Path(folder))
    if path.exists():
        doomed = path.with_name(f".{path.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        os.rename(temporary, path)
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        os.rename(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: pathlib.Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
