"""Writing a file so that it is there whole or not at all.

Owns the replacement and its permissions; what must outlive a power cut is synced as well, by
`train.durable_files`. Called for profiles and reports, and by commands for every file they were
told to write.
"""

import contextlib
import fcntl
import os
import pathlib
import tempfile

from lohan.errors import ConfigError

_ENDING = ".lohan-partial"


def write_text(path: pathlib.Path, text: str, *, is_private: bool = False) -> None:
    """Write a file so that it is either there whole or not at all; private: for the user alone.

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
