"""Room in the output folder for the final model and for archives, held before step 0.

Owns the arithmetic of what a run will write there, the file that holds the space until it is
needed, and the refusal of a run whose drives are too full for all of it. The states on the SSDs are
reserved by the engine. Called by `saving`, and by `lohan plan` for the arithmetic.
"""

import contextlib
import math
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from lohan.durable_files import new_file
from lohan.errors import OutOfSpace
from lohan.plan.run_room import DriveRoom, DriveUse
from lohan.ssd.engines.storage_errors import storage_errors
from lohan.units import format_bytes_decimal

RESERVED_NAME = ".lohan-reserved"
_MODEL_BYTES_PER_PARAMETER = 2
# A model in 16 bits, fp32 masters and two fp32 moments.
_ARCHIVE_BYTES_PER_PARAMETER = 2 + 12
_MODEL = "the model to start from"
_BESIDE_BYTES = 64 * 1000 * 1000


def out_uses(
    out: str,
    num_parameters: int,
    *,
    num_steps: int,
    archive_steps: int | None,
    save_total_limit: int | None,
    num_models: int = 1,
    save_model_steps: int | None = None,
) -> list[DriveUse]:
    """What a run will hold in its output folder at most. A model is written beside its place and
    moved there, so it takes its room once; the best one is kept beside the last."""

    def num_kept(every: int | None) -> int:
        made = 0 if every is None else num_steps // every
        if save_total_limit is None or save_total_limit <= 0:
            return made
        return min(made, save_total_limit + 1)  # a new one is complete before the oldest goes

    num_archives = num_kept(archive_steps)
    all_models = num_models + num_kept(save_model_steps)
    return [
        DriveUse(
            path=out,
            purpose="the finished model"
            + (" twice (the best one stays)" if num_models > 1 else "")
            + (", and those of steps" if save_model_steps is not None else ""),
            nbytes=all_models * _MODEL_BYTES_PER_PARAMETER * num_parameters + _BESIDE_BYTES,
        ),
        DriveUse(
            path=out,
            purpose=f"{num_archives} archive(s)",
            nbytes=num_archives * _ARCHIVE_BYTES_PER_PARAMETER * num_parameters,
        ),
    ]


def model_uses(directory: pathlib.Path, gguf_file: str | None = None) -> list[DriveUse]:
    """The weights a run starts from, which are on this machine."""
    files = [directory / gguf_file] if gguf_file else directory.glob("*.safetensors")
    nbytes = sum(file.stat().st_size for file in files if file.is_file())
    return [DriveUse(path=str(directory), purpose=_MODEL, nbytes=nbytes, is_there=True)]


def source_uses(source: Any) -> list[DriveUse]:
    """The weights of a `ModelSource`, on this machine or still to be fetched."""
    # It needs torch, and plans do not.
    from lohan.train.weights.checkpoint_files import stated_bytes

    if source is None or not source.has_files:
        return []
    if source.has_weights:
        return model_uses(source.directory, source.gguf_file)
    num_parameters = sum(math.prod(shape) for shape in source.parameters.values())
    nbytes = stated_bytes(source.directory) or _MODEL_BYTES_PER_PARAMETER * num_parameters
    return [DriveUse(path=str(source.directory), purpose=_MODEL, nbytes=nbytes)]


def refuse_full_drives(rooms: Sequence[DriveRoom]) -> None:
    """Refuse a run for which a filesystem has too little room, before anything is written.

    Raises:
        OutOfSpace: the numbers are named.
    """
    for room in rooms:
        if room.asked_bytes > room.free_bytes:
            raise OutOfSpace(
                f"the run does not fit on a drive: {room.in_words()}",
                why="all of it lies on one filesystem at the end of the run",
                remedy="free space there, put states (offload.ssd), OUT or the model elsewhere, or "
                "make fewer archives (offload.archive_steps, save_total_limit)",
                path=room.path,
            )


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
        with storage_errors("the output folder cannot be written", self._path):
            descriptor = new_file(self._path)
        try:
            # Where a filesystem cannot reserve, the check above has to be enough.
            with contextlib.suppress(OSError):
                os.posix_fallocate(descriptor, 0, nbytes)
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give the space back. Twice is fine."""
        self._path.unlink(missing_ok=True)
