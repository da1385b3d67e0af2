"""Finding the manifest to resume from among the copies in the directories of a run.

Owns reading the copies, telling damaged, foreign and missing ones apart, and choosing the newest.
Used by `states` when a run is opened, and by whoever lists runs without opening them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from lohan.errors import CheckpointError
from lohan.ssd.engines.storage_errors import storage_error
from lohan.store.seals.manifest import MANIFEST_NAME, Manifest, NewerFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundManifest:
    """The newest whole manifest, and what is wrong with other copies."""

    manifest: Manifest
    remarks: tuple[str, ...]
    """One sentence per directory whose copy is missing, damaged or older; empty if all agree."""


def find_manifest(directories: Sequence[str], run_id: str) -> FoundManifest:
    """Read the copies in the run directories and choose the newest whole one.

    Raises:
        CheckpointError: there is none, a copy is of another run or another version of the format,
            or a directory the states lie on is not given.
    """
    found: dict[str, Manifest] = {}
    remarks: dict[str, str] = {}
    for directory in directories:
        path = os.path.join(directory, MANIFEST_NAME)
        try:
            with open(path, encoding="utf-8") as file:
                found[directory] = Manifest.from_text(file.read())
        except FileNotFoundError:
            remarks[directory] = f"{path} is missing"
        except NewerFormat as error:
            raise NewerFormat(f"{path}: {error.what}", why=error.why, remedy=error.remedy) from None
        except (CheckpointError, UnicodeDecodeError) as error:
            remarks[directory] = f"{path} is damaged ({error})"
        except OSError as error:
            raise storage_error("a manifest could not be read", error, path=path) from None
    if not found:
        raise CheckpointError(
            f"run {run_id} has no sealed state: {'; '.join(remarks.values())}",
            why="without a manifest it is not known which bytes are the state",
            remedy="if the run ended before its first seal, remove its directories and start it "
            "anew; else restore a manifest from a copy",
        )
    newest_in = max(found, key=lambda directory: found[directory].seal_number)
    newest = found[newest_in]
    for directory, manifest in found.items():
        _refuse_foreign(directory, manifest, newest_in, newest, run_id)
        if manifest.seal_number < newest.seal_number:
            path = os.path.join(directory, MANIFEST_NAME)
            remarks[directory] = f"{path} is of seal {manifest.seal_number}"
    _refuse_missing_directories(directories, newest)
    return FoundManifest(
        manifest=newest,
        remarks=tuple(remarks[directory] for directory in directories if directory in remarks),
    )


def _refuse_foreign(
    directory: str, manifest: Manifest, newest_in: str, newest: Manifest, run_id: str
) -> None:
    if manifest.run_id != run_id:
        raise CheckpointError(
            f"the manifest in {directory} is of run {manifest.run_id!r}, not of {run_id!r}",
            why="the files there belong to another run",
            remedy="give the directories of the run you want to resume",
        )
    if manifest.store_key != newest.store_key:
        raise CheckpointError(
            f"the manifests in {directory} and {newest_in} are of two runs named {run_id!r}",
            why="their files do not belong together",
            remedy="give the directories of one of them",
        )


def _refuse_missing_directories(directories: Sequence[str], manifest: Manifest) -> None:
    wanted = manifest.stripe.num_drives
    if len(directories) == wanted:
        return
    given = {os.path.realpath(path) for path in directories}
    missing = [path for path in manifest.directories if os.path.realpath(path) not in given]
    raise CheckpointError(
        f"run {manifest.run_id} lies on {wanted} SSD directories, {len(directories)} are given"
        + (f"; missing: {', '.join(missing)}" if missing else ""),
        why="every directory holds a part of every block",
        remedy="give all directories of the run, in any order",
    )
