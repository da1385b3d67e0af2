"""Files a command was told to write: checked before anything is computed, written whole or not.

Owns the refusals (no such directory, exists already, one name twice) and the atomic replacement.
"""

import contextlib
import os
import pathlib
import tempfile
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


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a file so that it is either there whole or not at all.

    Raises:
        ConfigError: if it cannot be written; what was there before is then untouched.
    """
    # A link stays a link: the file it names is replaced.
    path = path.resolve()
    partial = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            partial = file.name
            file.write(text)
        # A temporary file is private; what the user asked for gets the usual permissions.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(partial, 0o666 & ~mask)
        os.replace(partial, path)
    except OSError as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        raise ConfigError(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            remedy="give a path in a writable directory with room",
        ) from error
