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
        if not path.parent.is_dir():
            raise ConfigError(
                f"{path} cannot be written",
                why=f"there is no directory {path.parent}",
                remedy="create it, or give another path",
            )
        if path.is_dir():
            raise ConfigError(
                f"{path} cannot be written", why="it is a directory", remedy="name a file"
            )
        if path.exists() and not path.is_file():
            # A file is replaced, not written into: that would take the device's place.
            raise ConfigError(
                f"{path} cannot be written",
                why="it is a device, a pipe or a socket, not a file",
                remedy="name a file",
            )
        if path.exists() and not force:
            raise ConfigError(
                f"{path} exists already",
                why="nothing is overwritten unasked",
                remedy="give another path, or add --force",
            )
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(
                f"{path} cannot be written",
                why=f"the directory {path.parent} is not writable",
                remedy="change its permissions, or give another path",
            )
        if path.resolve() in seen:
            raise ConfigError(
                f"{path} is named twice",
                why="one output would overwrite the other",
                remedy="give each output its own path",
            )
        seen.add(path.resolve())
