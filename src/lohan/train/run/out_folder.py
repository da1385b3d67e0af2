"""The output folder around a run: checked and locked before, as it was after a refusal.

Owns what may stand in OUT already, the lock that keeps two runs out of one folder, and taking
back what a refused run has put there. What a run writes once it is accepted is not its business.
Called by `fine_tune`, and by the trainers for the lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from lohan.durable_files import new_file
from lohan.errors import ConfigError
from lohan.held_locks import hold, let_go
from lohan.ssd.engines.storage_errors import storage_error, storage_errors
from lohan.ssd.runs.partial_directory import remove_left
from lohan.train.run.disk_reservation import RESERVED_NAME, Reservation
from lohan.train.run.resume_point import checkpoints, read_run
from lohan.working_folder import RUN_NAME, next_working_folder, working_folder

TABLES_FOLDER = "tables"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_OF_A_MODEL = ("config.json", "model.safetensors", "model.safetensors.index.json")


@dataclass(slots=True)
class HeldFolder:
    """The folder of a run that may still be refused."""

    is_accepted: bool = False
    """Set when training begins: from then on nothing is taken back."""


@contextlib.contextmanager
def held_folder(out: pathlib.Path, *, is_resuming: bool) -> Iterator[HeldFolder]:
    """Have the folder for one run; a run that is refused leaves it as it was, or leaves none.

    Raises:
        ConfigError: another run or a model is there, or another process is at work there.
        StorageError: it cannot be written.
    """
    _refuse_taken(out, is_resuming=is_resuming)
    made = _missing(next_working_folder(out))
    try:
        _make_writable(out)
        with locked_folder(out):
            remove_left(out)
            before, held = _tables_of(out), HeldFolder()
            try:
                yield held
            except BaseException:
                # A record of a run in a folder that had none: its states are on the SSDs.
                is_started = not is_resuming and (working_folder(out) / RUN_NAME).exists()
                if not held.is_accepted and not is_started:
                    _take_back(out, before)
                raise
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # not if there is anything in it
        raise


def _refuse_taken(out: pathlib.Path, *, is_resuming: bool) -> None:
    if is_resuming:
        return
    if read_run(out) is not None:
        raise ConfigError(
            f"{out} already holds a run ({RUN_NAME})",
            why="its checkpoints would be mixed with those of this run",
            remedy="add --resume to continue it, or give another --out",
        )
    taken = [name for name in _OF_A_MODEL if (out / name).exists()]
    if taken:
        raise ConfigError(
            f"{out} already holds a model ({taken[0]})",
            why="the fine-tuned model is written there at the end and would replace it",
            remedy="give another --out",
        )


def _missing(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders that have to be made, innermost first."""
    return [one for one in (folder, *folder.parents) if not os.path.lexists(one)]


def _make_writable(out: pathlib.Path) -> None:
    if out.exists() and not out.is_dir():
        raise storage_error("the output folder cannot be written", errno.ENOTDIR, path=str(out))
    with storage_errors("the output folder cannot be written", out):
        out.mkdir(parents=True, exist_ok=True)
        # As long as the longest name that is written at the end: not to be refused only then.
        probe = out / f".{out.name}.lohan-write-probe"
        os.close(new_file(probe))
        probe.unlink()


@contextlib.contextmanager
def locked_folder(out: pathlib.Path) -> Iterator[None]:
    """Hold the folder itself: no file is needed, and a killed process holds nothing.

    Raises:
        ConfigError: another process, or another trainer of this one, is at work there.
        StorageError: it cannot be locked.
    """
    descriptor = hold(os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is training into {out}",
                why="the files of both would be mixed",
                remedy="wait until it ends, or give another output folder",
            ) from None
        except OSError as error:
            # Filesystems without locks cannot keep two runs apart; the run goes on as it would.
            if error.errno not in _WITHOUT_LOCKS:
                what = "the output folder cannot be locked"
                raise storage_error(what, error, path=str(out)) from None
        yield
    finally:
        let_go(descriptor)


def set_aside(out: pathlib.Path, run_id: str) -> pathlib.Path | None:
    """Make room for another run where the one in OUT has ended, or has only evaluated; where its
    files are then.

    None where it has not ended, or is of an older release: nothing is changed then.
    """
    folder = working_folder(out)
    summary = folder / "summary.json"
    if folder == out:
        return None
    if summary.is_file():
        found = json.loads(summary.read_text(encoding="utf-8"))
        if found.get("run_id") != run_id or found.get("stopped_because") is not None:
            return None
    elif checkpoints(out):
        return None
    return folder.rename(folder.with_name(f"{folder.name}-{run_id}"))


def clear_folder_of(run_id: str, out: pathlib.Path) -> None:
    """Of a run that is removed: take what a killed process left in its folder, besides its files.

    Nothing where the folder is another run's by now, or somebody is at work there.

    Raises:
        ConfigError, StorageError: it is, or it cannot be read or written.
    """
    found = read_run(out) if out.is_dir() else None
    if found is not None and found.run_id == run_id:
        with locked_folder(out):
            remove_left(out)
            Reservation(out).release()


def refuse_replaced(out: pathlib.Path, before: os.stat_result) -> None:
    """Refuse to count on a folder that is not the one the run began with.

    Where a mount has vanished, files are written under it, and are hidden when it comes back.

    Raises:
        StorageError: it is gone, or another one is in its place.
    """
    if not (out.is_dir() and os.path.samestat(os.stat(out), before)):
        what = "the output folder was removed or replaced while the run went on"
        raise storage_error(what, errno.ENOENT, path=str(out))


def _tables_of(out: pathlib.Path) -> set[pathlib.Path]:
    folder = working_folder(out) / TABLES_FOLDER
    return {folder, *folder.rglob("*")} if folder.is_dir() else set()


def _take_back(out: pathlib.Path, before: set[pathlib.Path]) -> None:
    """Remove tables that were not there, and space that is still held."""
    with contextlib.suppress(OSError):
        (out / RESERVED_NAME).unlink(missing_ok=True)
    for path in sorted(_tables_of(out) - before):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
