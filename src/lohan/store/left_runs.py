"""Runs left on SSDs: which directories belong together, what they hold, and removing them.

Owns joining the directories of a run, telling a run's own files from anything else in them, and the
order of removal. Only files that a run makes are ever deleted, only of a run that nobody holds, and
only where all its directories are known unless the caller says otherwise. Called by `lohan clean`.
"""

import errno
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lohan.errors import CheckpointError, ConfigError, StorageError
from lohan.ssd import RunDirectories, RunPart, find_run_parts
from lohan.ssd.engines.storage_errors import storage_error
from lohan.ssd.runs.run_directory import LOCK_NAME
from lohan.store.activations import ACTIVATIONS_NAME
from lohan.store.files.state_file import STATES_NAME
from lohan.store.seals.manifest import MANIFEST_NAME, NAMES, Manifest, NewerFormat

MEASUREMENT_PREFIX = "measure-"
"""How the run ids of measurements begin."""
_PROBE_NAME = "probe"
_STRIPE_FILE = re.compile(rf"(?:{STATES_NAME}|{ACTIVATIONS_NAME})\.(?P<drive>\d{{1,4}})\.bin")
_MODEL_KEYS = ("model", "model_name_or_path", "model_name", "model_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftRun:
    """One run, with the directories of it that were given."""

    run_id: str
    parts: tuple[RunPart, ...]
    manifest: Manifest | None
    """The last seal; None: there is none that can be read."""
    missing: tuple[str, ...]
    """Directories of the run that were not given, as the last seal names them."""
    remarks: tuple[str, ...]
    refusal: str | None
    """Why this lohan must not remove it."""

    @property
    def step(self) -> int | None:
        """Step of the last seal."""
        return None if self.manifest is None else self.manifest.step

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What whoever sealed it wrote; the engine keeps what a trainer seals under "user"."""
        found = {} if self.manifest is None else self.manifest.metadata
        by_trainer = found.get("user")
        return {**found, **by_trainer} if isinstance(by_trainer, Mapping) else found

    @property
    def model(self) -> str | None:
        """The model, if the seal names it."""
        values = (self.metadata.get(key) for key in _MODEL_KEYS)
        return next((value for value in values if isinstance(value, str) and value), None)

    @property
    def out(self) -> str | None:
        """The output folder of the run, if the seal names it."""
        found = self.metadata.get("out")
        return found if isinstance(found, str) and found else None

    @property
    def disk_bytes(self) -> int:
        """Bytes its own files take on the SSDs."""
        return sum(
            file.disk_bytes
            for part in self.parts
            for file in part.files
            if _is_own(file.name, part.run_id) and file.is_plain
        )

    @property
    def changed_seconds(self) -> float:
        """When it last changed, in seconds since 1970."""
        return max(part.changed_seconds for part in self.parts)

    @property
    def holder(self) -> str | None:
        """Who holds it; None: nobody."""
        return next((part.holder for part in self.parts if part.holder), None)

    @property
    def is_measurement(self) -> bool:
        """Whether it is what a measurement of the drives left."""
        return self.run_id.startswith(MEASUREMENT_PREFIX) and self.manifest is None

    @property
    def foreign_files(self) -> tuple[str, ...]:
        """What lies in its directories and no run makes."""
        return tuple(
            os.path.join(part.path, file.name)
            for part in self.parts
            for file in part.files
            if not (_is_own(file.name, part.run_id) and file.is_plain)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftRuns:
    """All runs in some SSD directories."""

    runs: tuple[LeftRun, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What a removal did."""

    removed_bytes: int
    left: tuple[str, ...]
    """Directories that stay, because something else is in them."""


def _is_own(name: str, run_id: str) -> bool:
    """Whether a run makes files of this name in its directory."""
    if name == _PROBE_NAME:
        return run_id.startswith(MEASUREMENT_PREFIX)
    return name in (LOCK_NAME, *NAMES) or _STRIPE_FILE.fullmatch(name) is not None


def list_left_runs(parents: Sequence[str | os.PathLike[str]]) -> LeftRuns:
    """List the runs in SSD directories, the oldest first. Changes nothing.

    Raises:
        StorageError: none of the directories can be read.
    """
    found = find_run_parts(parents)
    by_name: dict[str, list[_Read]] = defaultdict(list)
    for part in found.parts:
        by_name[part.run_id].append(_read(part))
    runs = [_joined(group) for parts in by_name.values() for group in _groups(parts)]
    return LeftRuns(
        runs=tuple(sorted(runs, key=lambda run: (run.changed_seconds, run.run_id))),
        remarks=found.remarks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A directory and what its copy of the manifest says."""

    part: RunPart
    manifest: Manifest | None
    remark: str | None
    refusal: str | None


def _read(part: RunPart) -> _Read:
    path = os.path.join(part.path, MANIFEST_NAME)
    manifest, remark, refusal = None, None, None
    try:
        # Never through a link, and never from a pipe that nobody writes to.
        if any(file.name == MANIFEST_NAME and file.is_plain for file in part.files):
            with open(path, encoding="utf-8") as file:
                manifest = Manifest.from_text(file.read())
        if manifest is not None and manifest.run_id != part.run_id:
            refusal = f"the manifest in {part.path} is of run {manifest.run_id!r}"
            manifest = None
    except FileNotFoundError:
        pass
    except NewerFormat as error:
        refusal = f"{path}: {error.what}"
    except (CheckpointError, UnicodeDecodeError):
        remark = f"{path} is damaged"
    except OSError as error:
        remark = f"{path} cannot be read ({error.strerror})"
    return _Read(part=part, manifest=manifest, remark=remark, refusal=refusal)


def _groups(parts: list[_Read]) -> list[list[_Read]]:
    """Put together what belongs to one run; two runs may have the same name."""
    groups: dict[str, list[_Read]] = defaultdict(list)
    for read in parts:
        if read.manifest is not None:
            groups[read.manifest.store_key].append(read)
    rest = []
    for read in parts:
        if read.manifest is None:
            home = next((group for group in groups.values() if _belongs(read, group)), None)
            rest.append(read) if home is None else home.append(read)
    # Without a seal, the process that last held them is what directories have in common.
    by_process: dict[str, list[_Read]] = defaultdict(list)
    for read in rest:
        by_process[_process(read)].append(read)
    return [*groups.values(), *by_process.values()]


def _belongs(read: _Read, group: list[_Read]) -> bool:
    """Whether a directory without a whole manifest is one of a run that has seals elsewhere."""
    named = {
        os.path.realpath(path)
        for other in group
        if other.manifest is not None
        for path in other.manifest.directories
    }
    # Directories may have moved since; the process that held them last is then what tells.
    is_of_process = bool(read.part.note) and any(_process(read) == _process(o) for o in group)
    return read.part.path in named or is_of_process


def _process(read: _Read) -> str:
    return f"{read.part.note.get('pid')} on {read.part.note.get('host')}"


def _joined(group: list[_Read]) -> LeftRun:
    parts = tuple(read.part for read in group)
    sealed = [read.manifest for read in group if read.manifest is not None]
    newest = max(sealed, key=lambda manifest: manifest.seal_number, default=None)
    return LeftRun(
        run_id=parts[0].run_id,
        parts=parts,
        manifest=newest,
        missing=_missing(parts, newest),
        remarks=tuple(read.remark for read in group if read.remark),
        refusal=next((read.refusal for read in group if read.refusal), None),
    )


def _missing(parts: Sequence[RunPart], manifest: Manifest | None) -> tuple[str, ...]:
    given = {part.path for part in parts}
    if manifest is not None:
        num_missing = manifest.stripe.num_drives - len(parts)
        named = [path for path in manifest.directories if os.path.realpath(path) not in given]
        return tuple(named[: max(0, num_missing)])
    # Without a seal, the numbers in the names of the files tell how many directories there are.
    drives = {
        int(found["drive"])
        for part in parts
        for file in part.files
        if file.is_plain and (found := _STRIPE_FILE.fullmatch(file.name))
    }
    num_missing = max(drives, default=0) + 1 - len(parts)
    return ("a directory that no seal names",) * max(0, num_missing)


def refuse_removal(run: LeftRun, *, is_incomplete_fine: bool = False) -> None:
    """Refuse a run that must not be removed, before anybody is asked whether it should be.

    Raises:
        StorageError: a process holds it.
        ConfigError: it is not this lohan's to remove, or directories of it were not given.
    """
    if run.holder is not None:
        raise StorageError(
            f"run {run.run_id} is held by {run.holder}",
            why="its files are in use",
            remedy="wait for it or stop it first",
            path=run.parts[0].path,
            errno=errno.EWOULDBLOCK,
        )
    if run.refusal is not None:
        raise ConfigError(
            f"run {run.run_id} is not removed",
            why=run.refusal,
            remedy="use the lohan that made it, or remove the directory yourself",
        )
    if run.missing and not is_incomplete_fine:
        raise ConfigError(
            f"run {run.run_id} lies on {len(run.parts) + len(run.missing)} SSD directories, "
            f"{len(run.parts)} of them are given",
            why=f"the rest would be left behind: {', '.join(run.missing)}",
            remedy="give all its directories with --ssd; if the others are gone for good, add "
            "--incomplete",
        )


def remove_left_run(run: LeftRun, *, is_incomplete_fine: bool = False) -> Removal:
    """Delete a run's own files and then its directories. There is no way back. May block: yes.

    Raises:
        ConfigError, StorageError: as `refuse_removal`; or a file could not be deleted, and what
            was deleted before it is gone.
    """
    refuse_removal(run, is_incomplete_fine=is_incomplete_fine)
    held = RunDirectories.attach([part.parent for part in run.parts], run.run_id)
    is_done = False
    try:
        # Manifests first: a run without its seals is never taken for a whole one.
        removed_bytes = _delete(held.paths, run.run_id, should_take_manifests=True)
        removed_bytes += _delete(held.paths, run.run_id, should_take_manifests=False)
        is_done = True
    finally:
        paths = held.paths
        held.close(should_delete=is_done)
    return Removal(
        removed_bytes=removed_bytes, left=tuple(path for path in paths if os.path.lexists(path))
    )


def _delete(directories: Sequence[str], run_id: str, *, should_take_manifests: bool) -> int:
    removed_bytes = 0
    for directory in directories:
        try:
            with os.scandir(directory) as entries:
                found = [
                    (entry.path, entry.stat(follow_symlinks=False))
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                    and _is_own(entry.name, run_id)
                    and entry.name != LOCK_NAME
                    and (entry.name in NAMES) is should_take_manifests
                ]
        except OSError as error:
            raise _refused(error, directory) from None
        for path, status in found:
            if status.st_uid != os.geteuid():
                continue
            try:
                os.unlink(path)
            except OSError as error:
                raise _refused(error, path) from None
            removed_bytes += status.st_blocks * 512
    return removed_bytes


def _refused(error: OSError, path: str) -> StorageError:
    return storage_error("a run could not be removed", error, path=path)
