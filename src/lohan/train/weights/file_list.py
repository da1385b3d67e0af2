"""Files with the SHA-256 of each, in a list beside them: what is read is what was written.

Owns the list's form, hashing, and the comparison. A seal names the hash of the list of its folder,
the list names every file in it. Of a list that stands alone (an archive that was moved) every
changed bit shows too: a name is then missing, or a hash does not match. Used for checkpoint
folders, archives and exported models.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from lohan.durable_files import write_json
from lohan.errors import CheckpointError, Corrupt
from lohan.ssd.engines.storage_errors import storage_errors

T = TypeVar("T")
LIST_NAME = "files.json"
MODEL_LIST_NAME = "model_files.json"
"""Among the working files of a run: the model in OUT. In an exported model: its own files."""
VERSION = 1
_REMEDY = "copy the whole folder again, or resume from another checkpoint"


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes. May block: yes.

    Raises:
        CheckpointError: it is not there.
        StorageError: it cannot be read.
    """
    with storage_errors("a file cannot be read", path):
        try:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing", why="the list of files beside it names it", remedy=_REMEDY
            ) from None


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The hashes of files by their names within a folder."""
    return {name: hash_file(folder / name) for name in names}


def files_below(folder: Path) -> list[str]:
    """Names of all files in a folder and below, as lists have them."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def write_list(path: Path, files: Mapping[str, str]) -> str:
    """Write a list durably; returns the hash of the list itself. May block: yes."""
    write_json(path, {"version": VERSION, "files": dict(files)})
    return hash_file(path)


def read_list(path: Path) -> dict[str, str]:
    """The hashes in a list.

    Raises:
        CheckpointError: it cannot be read, or is of another version.
    """
    why = "it says which files belong together, and their hashes"
    return read_record(path, _List, versions=(VERSION,), why=why).files


@dataclass(frozen=True, slots=True, kw_only=True)
class _List:
    files: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versioned:
    version: int


def read_record(
    path: Path, kind: type[T], *, versions: Sequence[int], why: str, remedy: str = _REMEDY
) -> T:
    """Read a JSON file that a resume relies on; `why` says what for.

    Raises:
        CheckpointError: it cannot be read, a field is missing or wrong, or it is of a version
            other than `versions`, the newest first.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = msgspec.convert(found, _Versioned).version
        if version in versions:
            return msgspec.convert(found, kind)
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})", why=why, remedy=remedy) from error
    raise CheckpointError(
        f"{path} is of version {version}",
        why=f"this release reads version {versions[0]}",
        remedy="use the release that wrote it",
    )


def check_files(folder: Path, files: Mapping[str, str], names: Iterable[str] | None = None) -> None:
    """Read files and compare them with a list. May block: yes.

    Args:
        names: of the files to read; all of the list if not given.

    Raises:
        CheckpointError: a file is missing, or the list does not name it.
        Corrupt: a file does not have the bytes that were written; it is named.
    """
    for name in files if names is None else names:
        path = folder / name
        if name not in files:
            raise CheckpointError(
                f"{path} is not in the list of files that belong together",
                why="its bytes cannot be told from damaged ones",
                remedy=_REMEDY,
            )
        found = hash_file(path)
        if found != files[name]:
            raise Corrupt(
                f"{path.name} is damaged or was changed",
                why=f"its bytes are not those that were written (SHA-256 {files[name][:12]} then, "
                f"{found[:12]} now)",
                remedy=_REMEDY,
                path=str(path),
            )
