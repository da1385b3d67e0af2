"""What to go on from when the states of a run cannot be used: its newest whole copy.

Owns which failures of a resume call for one, and finding one that is intact by its checksums; the
damaged ones are named. Called by `saving` when a resume fails. Loads nothing.
"""

import errno
import pathlib

from lohan.errors import (
    CheckpointError,
    Corrupt,
    LohanError,
    OtherRanks,
    ShortTransfer,
    StorageError,
)
from lohan.train.run.resume_point import STATES_FOLDER, checkpoints, has_archive, read_resume
from lohan.train.weights.archive import check_states

# The drive or its files are gone. Others (a run somebody holds, no permission) go away by
# themselves, and a copy would only lose steps.
_GONE = (errno.ENOENT, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTDIR)


def intact_archive(
    out: pathlib.Path,
) -> tuple[pathlib.Path | None, list[tuple[pathlib.Path, LohanError]]]:
    """The newest whole copy in OUT, and newer ones that are damaged, with what is wrong.

    May block: yes, every byte of the copies looked at is read.
    """
    damaged: list[tuple[pathlib.Path, LohanError]] = []
    for path in reversed([path for path in checkpoints(out) if has_archive(path)]):
        try:
            read_resume(path)  # with the index of the copy
            check_states(path / STATES_FOLDER)
        except LohanError as error:
            damaged.append((path, error))
            continue
        return path, damaged
    return None, damaged


def with_offer(error: LohanError, out: pathlib.Path, run_id: str) -> LohanError:
    """The error of a failed resume, with the copy to resume from where that would help."""
    if not is_lost(error) or isinstance(error, OtherRanks):
        return error
    offered, damaged = intact_archive(out)
    if offered is None and not damaged:
        return error
    also = "".join(f"; {path.name} is damaged too: {one.what}" for path, one in damaged)
    remedy = f"resume from the newest intact copy: --resume-from {offered}"
    return CheckpointError(
        f"the states of run {run_id} cannot be resumed: {error.what}{also}",
        why=error.why,
        remedy=remedy if offered is not None else error.remedy,
    )


def is_lost(error: LohanError) -> bool:
    """Whether a resume failed because states or their files are gone or damaged."""
    if isinstance(error, StorageError):
        return isinstance(error, Corrupt | ShortTransfer) or error.errno in _GONE
    return isinstance(error, CheckpointError)
