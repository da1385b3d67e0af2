"""OUT/_lohan: the working files of a run, private to the user and apart from the model in OUT.

Owns where they are: rows as tables, settings, logs, plans and reports must not travel with the
model. Runs of older releases keep theirs in OUT itself. Called by everything that reads or writes
such files.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator

from lohan.errors import CheckpointError

RUN_NAME = "run.json"
CONFIG_NAME = "lohan.yaml"
_NAME = "_lohan"
PRIVATE_MODE = 0o700


def working_folder(out: pathlib.Path) -> pathlib.Path:
    """Where the working files of the run in OUT are; OUT itself for runs of older releases."""
    inner = out / _NAME
    return inner if inner.is_dir() else out


def settings_of_run(out: pathlib.Path) -> pathlib.Path | None:
    """The settings a run in OUT was accepted with; None if it never was.

    Raises:
        CheckpointError: no run ever started there.
    """
    folder = working_folder(out)
    if not (folder / RUN_NAME).exists():
        raise no_run_in(out)
    return folder / CONFIG_NAME if (folder / CONFIG_NAME).is_file() else None


def no_run_in(out: pathlib.Path) -> CheckpointError:
    """The error where a run is to go on and there is none."""
    return CheckpointError(
        f"there is no run in {out}",
        why=f"a run leaves {RUN_NAME} there before its first step",
        remedy="give the output folder of the run to resume, or start without resuming",
    )


def next_working_folder(out: pathlib.Path) -> pathlib.Path:
    """Where a run that begins or goes on in OUT writes such files; it may have to be made."""
    is_older = working_folder(out) == out and (out / RUN_NAME).exists()
    return out if is_older else out / _NAME


def make_working_folder(out: pathlib.Path) -> pathlib.Path:
    """The same, made for nobody but the user where it is not there."""
    folder = next_working_folder(out)
    folder.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files that are made within are private, whoever makes them: libraries ask the umask.

    It is the whole process's, so nothing that others are to read may be written meanwhile.
    """
    before = os.umask(0o777 & ~PRIVATE_MODE)
    try:
        yield
    finally:
        os.umask(before)
