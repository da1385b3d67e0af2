"""From an errno to the exception a user can act on.

Owns the sentences: what each errno of a drive or filesystem means for a run, and what to do then.
Called by the engines when a request failed, and by the files and directories when a call did.
"""

import contextlib
import errno
import os
from collections.abc import Iterator

from lohan.errors import OutOfSpace, ShortTransfer, StorageError

_WHY_AND_REMEDY = {
    errno.ENOSPC: (
        "the filesystem has no space left",
        "free space there, give another SSD directory, or lower what is kept on SSD",
    ),
    errno.EDQUOT: (
        "your disk quota on this filesystem is used up",
        "free space, ask for a larger quota, or give another SSD directory",
    ),
    errno.EROFS: (
        "the filesystem is mounted read-only (Linux does this by itself after disk errors)",
        "look at the kernel log for disk errors, remount it for writing, or give another directory",
    ),
    errno.EIO: (
        "the drive or filesystem reported an input/output error",
        "look at the kernel log and the drive's health (smartctl); bytes there may be lost",
    ),
    errno.EACCES: (
        "this user has no permission for it",
        "give a directory you own, or change its permissions",
    ),
    errno.EPERM: (
        "the system does not permit it",
        "check the mount options, file attributes and sandbox of this process",
    ),
    errno.ENOENT: (
        "it does not exist (any more)",
        "check the path, and that nothing removes files of a run that is going on",
    ),
    errno.EFBIG: (
        "the file would be larger than the filesystem or this process may make it",
        "check `ulimit -f` and the filesystem's largest file size",
    ),
    errno.EINVAL: (
        "the filesystem refused the request, often because its blocks are larger than 4096 bytes",
        "try another filesystem (ext4 and xfs work), and report this",
    ),
    errno.EMFILE: (
        "this process has too many open files",
        "raise the limit with `ulimit -n`",
    ),
    errno.ESTALE: (
        "the file was replaced on the server it lives on",
        "use a local SSD; network filesystems are not made for this",
    ),
    errno.EEXIST: (
        "it is there already",
        "remove it yourself if nothing needs it, or use another run id",
    ),
    errno.ENAMETOOLONG: (
        "the path, or one name in it, is longer than the filesystem allows",
        "give a directory with a shorter path",
    ),
    errno.ELOOP: (
        "a symbolic link stands where a file or directory of a run has to be",
        "remove the link, or give the directory it leads to",
    ),
    errno.ENFILE: (
        "the whole system has too many open files",
        "close what else has files open, or raise fs.file-max",
    ),
    errno.ENOMEM: (
        "the kernel has no memory left for the request",
        "close what else uses memory, or lower the RAM budget",
    ),
    errno.EFAULT: (
        "the memory of the request was given back before the request was done",
        "keep a buffer until its ticket was waited for; this is a mistake in lohan",
    ),
    errno.ENODEV: (
        "the drive is gone",
        "look at the kernel log: it was removed, or reset itself after an error",
    ),
    errno.ENXIO: (
        "the drive is gone",
        "look at the kernel log: it was removed, or reset itself after an error",
    ),
    errno.ENOTDIR: (
        "it is not a directory",
        "give the path of a directory",
    ),
}
_UNKNOWN = (
    "the operating system refused it",
    "look up the errno above and the kernel log",
)


def storage_error(
    what: str,
    reason: int | OSError,
    *,
    path: str,
    offset_bytes: int | None = None,
    asked_bytes: int | None = None,
    got_bytes: int | None = None,
) -> StorageError:
    """Make the exception for an errno: `OutOfSpace` where space is the matter."""
    number = reason if isinstance(reason, int) else reason.errno or errno.EIO
    why, remedy = _WHY_AND_REMEDY.get(number, _UNKNOWN)
    kind = OutOfSpace if number in (errno.ENOSPC, errno.EDQUOT) else StorageError
    return kind(
        what,
        why=why,
        remedy=remedy,
        path=path,
        offset_bytes=offset_bytes,
        asked_bytes=asked_bytes,
        got_bytes=got_bytes,
        errno=number,
    )


@contextlib.contextmanager
def storage_errors(
    what: str, path: str | os.PathLike[str], *, offset_bytes: int | None = None
) -> Iterator[None]:
    """Within it, what the operating system refuses is raised as `storage_error` of `what`."""
    try:
        yield
    except OSError as error:
        path = os.fspath(path)
        raise storage_error(what, error, path=path, offset_bytes=offset_bytes) from None


def short_transfer(
    what: str, *, path: str, offset_bytes: int, asked_bytes: int, got_bytes: int
) -> ShortTransfer:
    """Make the exception for a transfer that made no more progress."""
    return ShortTransfer(
        f"{what} ended early",
        why="the file is shorter than its layout says: something truncated it, or a copy of it is "
        "incomplete",
        remedy="find out what touched the file; resume from a checkpoint whose files are whole",
        path=path,
        offset_bytes=offset_bytes,
        asked_bytes=asked_bytes,
        got_bytes=got_bytes,
    )
