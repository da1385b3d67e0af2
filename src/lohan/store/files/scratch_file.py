"""A striped file for bytes that mean nothing after a crash: activations, and gradients that spill.

Owns making it, after removing what a killed process of the same run left. Used by
`activations`.
"""

import errno
import os
from collections.abc import Sequence

from lohan.errors import StorageError
from lohan.ssd import CHUNK_BYTES, DriveId, IoEngine, RunDirectories, StripedFile, add_drives
from lohan.ssd.stripe_files import file_name


def make_scratch_file(
    run: RunDirectories,
    name: str,
    *,
    engine: IoEngine,
    drives: Sequence[DriveId] | None,
    weights: Sequence[float] | None,
    capacity_bytes: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> StripedFile:
    """Reserve the file; a leftover of the same name in this run's own directories goes first.

    Raises:
        OutOfSpace, StorageError: it could not be made; nothing is left behind.
    """
    drives = add_drives(engine, run.paths) if drives is None else drives
    # The directories are this run's and locked, so the leftover is ours and nobody uses it.
    for directory, drive in zip(run.paths, drives, strict=True):
        for number in range(len(run.paths)):
            path = os.path.join(directory, file_name(name, number))
            try:
                engine.remove_file(engine.open_file(path, drive=drive))
            except StorageError as error:
                if error.errno != errno.ENOENT:
                    raise
    return StripedFile.create(
        run,
        name=name,
        engine=engine,
        capacity_bytes=capacity_bytes,
        weights=weights,
        drives=drives,
        chunk_bytes=chunk_bytes,
    )
