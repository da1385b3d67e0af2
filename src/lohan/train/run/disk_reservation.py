"""Room in the output folder for the final model and for archives, held before step 0.

Owns the arithmetic of what a run will write there and the file that holds the space until it is
needed. The states on the SSDs are reserved by the engine. Called by `saving`.
"""

import contextlib
import errno
import os
import pathlib
import shutil

from lohan.errors import OutOfSpace
from lohan.ssd.engines.storage_errors import storage_error
from lohan.units import format_bytes_decimal

RESERVED_NAME = ".lohan-reserved"
_MODEL_BYTES_PER_PARAMETER = 2
# A model in 16 bits, fp32 masters and two fp32 moments.
_ARCHIVE_BYTES_PER_PARAMETER = 2 + 12
_BESIDE_BYTES = 64 * 1000 * 1000


def needed_bytes(
    num_parameters: int,
    *,
    num_steps: int,
    archive_steps: int | None,
    save_total_limit: int | None,
) -> tuple[int, int]:
    """Bytes a run will hold in its output folder at most, and how many archives that counts."""
    num_archives = 0 if archive_steps is None else num_steps // archive_steps
    if save_total_limit is not None and save_total_limit > 0:
        # A new archive is complete before the oldest one goes.
        num_archives = min(num_archives, save_total_limit + 1)
    archives = num_archives * _ARCHIVE_BYTES_PER_PARAMETER * num_parameters
    return archives + _MODEL_BYTES_PER_PARAMETER * num_parameters + _BESIDE_BYTES, num_archives


class Reservation:
    """Space of a folder, held by a file without content; gone when the process lets go of it."""

    def __init__(self, out: pathlib.Path) -> None:
        self._path = out / RESERVED_NAME

    def hold(self, nbytes: int, *, purpose: str) -> None:
        """Hold this much, in place of what was held. May block: where files cannot be reserved.

        Raises:
            OutOfSpace: there is less; the numbers are named.
            StorageError: the folder cannot be written.
        """
        self.release()
        free_bytes = shutil.disk_usage(self._path.parent).free
        if free_bytes < nbytes:
            raise OutOfSpace(
                f"{self._path.parent} needs {format_bytes_decimal(nbytes)} for {purpose}, "
                f"{format_bytes_decimal(free_bytes)} are free",
                why="a run that cannot save its model would be for nothing",
                remedy="free space there, give another output folder, or make fewer archives "
                "(offload: archive_steps, save_total_limit)",
                path=str(self._path.parent),
            )
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(
                "the output folder cannot be written",
                error.errno or errno.EIO,
                path=str(self._path),
            ) from None
        try:
            # Where a filesystem cannot reserve, the check above has to be enough.
            with contextlib.suppress(OSError):
                os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give the space back. Twice is fine."""
        self._path.unlink(missing_ok=True)
