"""Seals of a run whose states lie in several stores: one small record says which seal all of them
have.

A rank prepares its manifest beside the old one; when all have, the first rank writes the record;
then everybody replaces. Whoever stops in between finds, by the record, whether what it prepared is
the seal to go on from. Owns the record and that decision; who waits for whom is the caller's.
"""

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from lohan.durable_files import sync_directory, write_json
from lohan.errors import CheckpointError, OtherRanks
from lohan.ssd.engines.storage_errors import storage_errors
from lohan.ssd.runs.run_directory import PREFIX
from lohan.store.seals.manifest import (
    COMMIT_NAME,
    MANIFEST_NAME,
    TEMPORARY_NAME,
    Manifest,
)

_NAME_OF_RANK = re.compile(r"(?P<run>.+)\.r\d+of(?P<ranks>\d+)")


def name_of_rank(run_id: str, rank: int, num_ranks: int) -> str:
    """What a rank's directories of a run are named after."""
    return run_id if num_ranks == 1 else f"{run_id}.r{rank}of{num_ranks}"


def run_of(name: str) -> tuple[str, int]:
    """The run that directories of this name are of, and by how many ranks it was made."""
    found = _NAME_OF_RANK.fullmatch(name)
    return (found["run"], int(found["ranks"])) if found else (name, 1)


def num_ranks_of(ssd: Sequence[str | os.PathLike[str]], run_id: str) -> int:
    """By how many ranks a run was made, as its directories say; 1 where there are none."""
    return max(_numbers_of_ranks(ssd, run_id), default=1)


def refuse_other_ranks(ssd: Sequence[str | os.PathLike[str]], run_id: str, num_ranks: int) -> None:
    """Refuse to go on with a run that another number of ranks has made.

    Raises:
        OtherRanks: with the way to do it.
    """
    found = set(_numbers_of_ranks(ssd, run_id))
    if not found or num_ranks in found:
        return
    made_by = max(found)
    raise OtherRanks(
        f"run {run_id} was made by {made_by} rank(s), and {num_ranks} want to go on with it",
        why="each rank's directories hold its own slice of every block",
        remedy=f"start {made_by} rank(s) (--gpus, torchrun), or go on from an archive of the run "
        "(--resume-from), which any number of ranks that divides its reduction groups can",
    )


def _numbers_of_ranks(ssd: Sequence[str | os.PathLike[str]], run_id: str) -> Iterator[int]:
    for parent in ssd:
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                found, num_ranks = run_of(name.removeprefix(PREFIX))
                if name.startswith(PREFIX) and found == run_id:
                    yield num_ranks


def write_commit(directories: Sequence[str], manifest: Manifest) -> None:
    """Say that all ranks have prepared the seal of this manifest. May block: yes.

    Raises:
        StorageError: it could not be written; it is not known whether it is there.
    """
    for directory in directories:
        path = pathlib.Path(directory, COMMIT_NAME)
        with storage_errors("the record of a seal could not be written", str(path)):
            write_json(path, {"seal_number": manifest.seal_number, "step": manifest.step})


def read_commit(directories: Sequence[str]) -> int:
    """The number of the last seal that all ranks have; 0 if there is none.

    Raises:
        CheckpointError: a record is damaged.
    """
    newest = 0
    for directory in directories:
        path = os.path.join(directory, COMMIT_NAME)
        try:
            with open(path, encoding="utf-8") as file:
                newest = max(newest, int(json.load(file)["seal_number"]))
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error})",
                why="it says which seal all ranks have",
                remedy="restore it from a copy, or start from an archive",
            ) from None
    return newest


def settle_prepared(directories: Sequence[str], committed: int) -> None:
    """Take what was prepared for the seal that all ranks have, and remove what was for a later one.

    Raises:
        StorageError: a file could not be replaced.
    """
    for directory in directories:
        prepared = os.path.join(directory, TEMPORARY_NAME)
        with storage_errors("a prepared manifest could not be taken", prepared):
            try:
                with open(prepared, encoding="utf-8") as file:
                    number = Manifest.from_text(file.read()).seal_number
            except FileNotFoundError:
                continue
            except CheckpointError:
                number = 0  # it was being written
            if number == committed:
                os.replace(prepared, os.path.join(directory, MANIFEST_NAME))
            else:
                os.unlink(prepared)
            sync_directory(directory)


def refuse_other_seal(manifest: Manifest, committed: int, rank: int) -> None:
    """Refuse states that are of another seal than those of other ranks.

    Raises:
        CheckpointError: naming the rank.
    """
    if manifest.seal_number != committed:
        raise CheckpointError(
            f"rank {rank} has seal {manifest.seal_number} of step {manifest.step}, and all ranks "
            f"had seal {committed}",
            why="slices of two steps do not make a model",
            remedy="give this rank the directories it had, or start from an archive",
        )
