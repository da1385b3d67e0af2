"""The files under a stripe set: made all or none, their space reserved before use.

Owns the check that space is there, making files with undo, and finding them again.
Called by `striped_file` only.
"""

import contextlib
import errno
import os
from collections.abc import Sequence

from lohan.errors import ConfigError, LohanError, OutOfSpace, StorageError
from lohan.ssd.engines.engine import DriveId, DriveSettings, IoEngine, IoFile
from lohan.ssd.engines.storage_errors import short_transfer, storage_error, storage_errors
from lohan.ssd.layout import StripeLayout
from lohan.ssd.runs.run_directory import RunDirectories
from lohan.units import format_bytes


def file_name(name: str, drive: int) -> str:
    """Name of a drive's file. The number makes a swapped pair of directories harmless."""
    return f"{name}.{drive}.bin"


def refuse_without_space(
    engine: IoEngine, directories: Sequence[str], extra_bytes: Sequence[int]
) -> None:
    """Refuse what cannot fit, before a byte is taken. Directories of one filesystem share it.

    Raises:
        OutOfSpace: a filesystem has less free than its directories need.
    """
    needed: dict[int, tuple[str, int]] = {}
    for directory, nbytes in zip(directories, extra_bytes, strict=True):
        device = _device_of(directory)
        first, sum_bytes = needed.get(device, (directory, 0))
        needed[device] = (first, sum_bytes + nbytes)
    for directory, nbytes in needed.values():
        free_bytes = engine.free_bytes(directory)
        if nbytes > free_bytes:
            raise OutOfSpace(
                f"{format_bytes(nbytes)} are needed on the filesystem of {directory}, "
                f"{format_bytes(free_bytes)} are free",
                why=f"{format_bytes(nbytes - free_bytes)} are missing, and a run must not stop "
                "half-way for want of space",
                remedy="free space there, add an SSD directory, or keep less on SSD",
                path=directory,
                asked_bytes=nbytes,
                got_bytes=free_bytes,
                errno=errno.ENOSPC,
            )


def make_files(
    engine: IoEngine,
    run: RunDirectories,
    drives: Sequence[DriveId],
    name: str,
    layout: StripeLayout,
) -> list[IoFile | None]:
    """Make and reserve the file of every drive; None where a drive has no chunk.

    Raises:
        OutOfSpace, StorageError: one could not be made; none is left behind.
    """
    sizes = [layout.file_bytes(drive) for drive in range(layout.num_drives)]
    refuse_without_space(engine, run.paths, sizes)
    files: list[IoFile | None] = []
    try:
        for drive, directory in enumerate(run.paths):
            if drive not in layout.pattern:
                files.append(None)
                continue
            path = os.path.join(directory, file_name(name, drive))
            file = engine.create_file(path, drive=drives[drive])
            files.append(file)
            engine.resize(file, sizes[drive])
        run.sync()
    except BaseException:
        for made in files:
            if made is not None:
                with contextlib.suppress(OSError, StorageError):
                    engine.remove_file(made)
        raise
    return files


def find_files(
    engine: IoEngine,
    directories: Sequence[str],
    drives: Sequence[DriveId],
    name: str,
    layout: StripeLayout,
) -> list[IoFile | None]:
    """Open the files of a stripe set again, in whichever directory each one is.

    Raises:
        StorageError: one is missing.
        ShortTransfer: one is shorter than the layout says.
    """
    files: list[IoFile | None] = []
    try:
        for drive in range(layout.num_drives):
            if drive not in layout.pattern:
                files.append(None)
                continue
            file = _find_file(engine, directories, drives, file_name(name, drive))
            files.append(file)
            wanted_bytes, found_bytes = layout.file_bytes(drive), engine.file_bytes(file)
            if found_bytes < wanted_bytes:
                raise short_transfer(
                    "opening a striped file",
                    path=file.path,
                    offset_bytes=0,
                    asked_bytes=wanted_bytes,
                    got_bytes=found_bytes,
                )
    except BaseException:
        for opened in files:
            if opened is not None:
                engine.close_file(opened)
        raise
    return files


def refuse_files_out_of_place(engine: IoEngine, files: Sequence[IoFile | None]) -> None:
    """Refuse to go on with a file whose path leads elsewhere: nobody would find its bytes again.

    Raises:
        StorageError: one was removed or replaced.
    """
    for file in files:
        if file is not None and not engine.is_in_place(file):
            raise storage_error(
                "a file of this run was removed or replaced while it was in use",
                errno.ENOENT,
                path=file.path,
            )


def close_files(
    engine: IoEngine, files: Sequence[IoFile | None], *, should_delete: bool
) -> list[LohanError]:
    """Close all files, and delete those still in place if asked; says what went wrong."""
    errors: list[LohanError] = []
    for file in files:
        if file is None:
            continue
        try:
            if should_delete:
                engine.remove_file(file)
            else:
                engine.close_file(file)
        except LohanError as error:
            errors.append(error)
    return errors


def _find_file(
    engine: IoEngine, directories: Sequence[str], drives: Sequence[DriveId], name: str
) -> IoFile:
    for directory, drive in zip(directories, drives, strict=True):
        try:
            return engine.open_file(os.path.join(directory, name), drive=drive)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
    raise storage_error(
        f"the file {name} is in none of the {len(directories)} SSD directories of this run",
        errno.ENOENT,
        path=directories[0],
    )


def add_drives(
    engine: IoEngine,
    directories: Sequence[str],
    settings: Sequence[DriveSettings] | None = None,
) -> tuple[DriveId, ...]:
    """Add one queue per filesystem to an engine, and say which one each directory uses.

    Call it once per run and give the result to every striped file: two queues in front of one
    drive would crowd it. Directories on one filesystem share the settings of the first.
    """
    settings = [DriveSettings()] * len(directories) if settings is None else settings
    refuse_wrong_count("drive settings", settings, directories)
    by_device: dict[int, DriveId] = {}
    drives = []
    for directory, wanted in zip(directories, settings, strict=True):
        device = _device_of(directory)
        if device not in by_device:
            by_device[device] = engine.add_drive(wanted)
        drives.append(by_device[device])
    return tuple(drives)


def refuse_wrong_count(noun: str, given: Sequence[object], directories: Sequence[str]) -> None:
    """Refuse a list with one entry per directory that has more or fewer."""
    if len(given) != len(directories):
        raise ConfigError(
            f"{len(given)} {noun} are given for {len(directories)} SSD directories",
            why="each directory needs its own",
            remedy="give one per directory, or none",
        )


def _device_of(directory: str) -> int:
    with storage_errors("an SSD directory failed", directory):
        return os.stat(directory).st_dev
