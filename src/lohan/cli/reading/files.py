"""Files a command was told to write: checked before anything is computed, written whole or not.

Owns the refusals (no such directory, exists already, one name twice). Writing is `durable_files`'.
"""

import os
import pathlib
from collections.abc import Iterable

from lohan.errors import ConfigError


def check_outputs(paths: Iterable[pathlib.Path | None], *, force: bool) -> None:
    """Refuse outputs that cannot be written, before time is spent on them.

    Raises:
        ConfigError: naming the path and what to do.
    """
    seen: set[pathlib.Path] = set()
    for path in paths:
        if path is None:
            continue
        folder, what = path.parent, f"{path} cannot be written"
        if not folder.is_dir():
            why, remedy = f"there is no directory {folder}", "create it, or give another path"
        elif path.is_dir():
            why, remedy = "it is a directory", "name a file"
        elif path.exists() and not path.is_file():
            # A file is replaced, not written into: that would take the device's place.
            why, remedy = "it is a device, a pipe or a socket, not a file", "name a file"
        elif path.exists() and not force:
            what, why = f"{path} exists already", "nothing is overwritten unasked"
            remedy = "give another path, or add --force"
        elif not os.access(folder, os.W_OK):
            why = f"the directory {folder} is not writable"
            remedy = "change its permissions, or give another path"
        elif path.resolve() in seen:
            what, why = f"{path} is named twice", "one output would overwrite the other"
            remedy = "give each output its own path"
        else:
            seen.add(path.resolve())
            continue
        raise ConfigError(what, why=why, remedy=remedy)
