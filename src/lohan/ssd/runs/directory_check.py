"""Is this directory fit for a run? Asked before anything is made in it.

Owns the checks of SSD directories (there, writable, which filesystem, direct I/O, free space) and
what is said about them. Leaves nothing behind. Called before a run is made, and by `lohan doctor`.
"""

import contextlib
import errno
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lohan import _native
from lohan.errors import ConfigError, StorageError
from lohan.ssd.engines.engine import ALIGNMENT_BYTES, Access
from lohan.ssd.engines.storage_errors import storage_error
from lohan.units import GIB, format_bytes

_IN_RAM = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_OVER_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre"})
_MOUNTS = "/proc/self/mountinfo"


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryReport:
    """What was found out about an SSD directory."""

    path: str
    """Absolute, symbolic links resolved."""
    filesystem: str
    """Its type: `ext4`, `xfs`, `tmpfs`."""
    device: int
    """Number of the filesystem: equal for two directories on the same one."""
    access: Access
    free_bytes: int
    total_bytes: int
    warnings: tuple[str, ...]


def check_directory(path: str | os.PathLike[str]) -> DirectoryReport:
    """Check one directory.

    Raises:
        StorageError: it is missing, no directory, or cannot be written to.
    """
    given = os.fspath(path)
    real = os.path.realpath(given)
    try:
        status = os.stat(real)
        if not os.path.isdir(real):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        access = _try_direct(real)
        space = os.statvfs(real)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise StorageError(
                "an SSD directory cannot be used",
                why="it does not exist, and making it could put it on another drive than you mean",
                remedy=f"check that the drive is mounted, then mkdir -p {shlex.quote(given)}",
                path=given,
                errno=errno.ENOENT,
            ) from None
        raise storage_error("an SSD directory cannot be used", error, path=given) from None
    filesystem = filesystem_type(real)
    warnings = []
    if filesystem in _IN_RAM:
        warnings.append(f"{given} is on {filesystem}: that is RAM, not an SSD")
    if filesystem in _OVER_NETWORK:
        warnings.append(f"{given} is on {filesystem}: a network filesystem is far slower than SSD")
    if access is Access.BUFFERED and filesystem not in _IN_RAM:
        warnings.append(
            f"{given} ({filesystem}) refuses direct I/O: bytes go through the page cache, which "
            "costs CPU time and RAM"
        )
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < GIB:
        warnings.append(f"{given} has only {format_bytes(free_bytes)} free")
    return DirectoryReport(
        path=real,
        filesystem=filesystem,
        device=status.st_dev,
        access=access,
        free_bytes=free_bytes,
        total_bytes=space.f_blocks * space.f_frsize,
        warnings=tuple(warnings),
    )


def check_directories(paths: Sequence[str | os.PathLike[str]]) -> tuple[DirectoryReport, ...]:
    """Check all directories of a run, each on its own and against each other.

    Raises:
        ConfigError: none is given, or one is given twice.
        StorageError: one cannot be used.
    """
    if not paths:
        raise ConfigError(
            "no SSD directory is given",
            why="states that do not fit in RAM need a place",
            remedy="name one directory per SSD",
        )
    reports: list[DirectoryReport] = []
    for path in paths:
        report = check_directory(path)
        for other in reports:
            if other.path == report.path:
                raise ConfigError(
                    f"the SSD directory {os.fspath(path)} is given twice",
                    why=f"it is the same place as {other.path}",
                    remedy="name each SSD once",
                )
            if other.device == report.device:
                warning = (
                    f"{report.path} and {other.path} are on the same filesystem: together they are "
                    "no faster than one"
                )
                report = replace(report, warnings=(*report.warnings, warning))
                break
        reports.append(report)
    return tuple(reports)


def filesystem_type(path: str) -> str:
    """Name the filesystem a path is on, or `unknown`."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.readlines()
    except OSError:
        return "unknown"
    best = ("", "unknown")
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4]
        for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
            point = point.replace(code, character)
        is_above = path == point or path.startswith(point.rstrip("/") + "/")
        # Of mounts on the same point the last one is on top.
        if is_above and len(point) >= len(best[0]):
            best = (point, after.split(" ")[0])
    return best[1]


def _try_direct(directory: str) -> Access:
    """Write and read back one page: opening alone does not prove that direct I/O works."""
    memory = _native.AlignedMemory(ALIGNMENT_BYTES, True)
    written = os.urandom(ALIGNMENT_BYTES)
    memoryview(memory)[:] = written
    for flag, access in ((os.O_DIRECT, Access.DIRECT), (0, Access.BUFFERED)):
        try:
            with _nameless_file(directory, flag) as descriptor:
                if os.pwrite(descriptor, memoryview(memory), 0) != ALIGNMENT_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                got = os.preadv(descriptor, [memoryview(memory)], 0)
        except OSError as error:
            if flag and error.errno == errno.EINVAL:
                continue
            raise
        if got != ALIGNMENT_BYTES or memoryview(memory) != written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return access
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@contextlib.contextmanager
def _nameless_file(directory: str, flag: int) -> Iterator[int]:
    """A file that vanishes when closed: never visible where the filesystem can do that."""
    flags = os.O_RDWR | os.O_CLOEXEC | flag
    try:
        descriptor = os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
            raise
        maker, name = tempfile.mkstemp(prefix=".lohan-check-", dir=directory)
        os.close(maker)
        try:
            descriptor = os.open(name, flags)
        finally:
            os.unlink(name)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
