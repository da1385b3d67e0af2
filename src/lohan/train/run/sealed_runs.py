"""Runs that were left on SSDs: found, verified, and their model exported.

Owns finding a run from what a user names (an id, a run directory, the output folder of a run) and
opening its last seal for reading. Called by `checking`, `lohan export` and `lohan report`.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lohan.engine.model_buffers import changed_buffers
from lohan.engine.results import sealed_buffers
from lohan.errors import CheckpointError, ConfigError
from lohan.ssd import RunDirectories, choose_engine
from lohan.ssd.engines.storage_errors import storage_errors
from lohan.store import ComputeFormat, Manifest, StateStore, list_left_runs, open_states
from lohan.store.masters import JoinedStates
from lohan.store.seals.commits import (
    name_of_rank,
    num_ranks_of,
    read_commit,
    refuse_other_seal,
    run_of,
    settle_prepared,
)
from lohan.store.seals.manifest import MANIFEST_NAME
from lohan.train.adapters.adapter_files import export_adapter, saved_names
from lohan.train.adapters.adapting import ADAPTER, ADAPTER_TENSORS
from lohan.train.adapters.merging import adapted_skeleton, merged_tensors, refuse_unmergeable
from lohan.train.run.resume_point import read_resume
from lohan.train.weights.check_export import ModelDirectoryReport
from lohan.train.weights.checkpoint_files import shown
from lohan.train.weights.export_hf import MAX_SHARD_BYTES, export_model, refuse_taken
from lohan.train.weights.model_identity import MODEL_IDENTITY, of_source, refuse_other_model
from lohan.train.weights.source import ModelSource, open_source
from lohan.working_folder import RUN_NAME, working_folder

_PREFIX = "lohan-"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """A run and the SSD directories its own directories are in."""

    run_id: str
    ssd: tuple[Path, ...]


def find_run(run: str, ssd: Sequence[Path] = ()) -> RunPlace:
    """Find a run.

    Args:
        run: a run id, a run's directory on an SSD or the SSD directory it is alone in, or the
            output folder of a run.
        ssd: the SSD directories; needed for an id, and where they have moved.

    Raises:
        ConfigError: it is not said where the run is.
        CheckpointError: the record or the manifest that says it cannot be read.
    """
    path = Path(run).expanduser()
    named = working_folder(path) / RUN_NAME
    if named.is_file():
        record = _from_record(named)
        return RunPlace(run_id=record.run_id, ssd=tuple(ssd) or record.ssd)
    if ssd:
        name = path.name if path.is_dir() else run
        return RunPlace(run_id=run_of(name.removeprefix(_PREFIX))[0], ssd=tuple(ssd))
    if path.is_dir() and path.name.startswith(_PREFIX):
        return _from_directory(path)
    inside = runs_in(path)
    if len({run_of(one.name)[0] for one in inside}) == 1:
        return _from_directory(inside[0])
    raise ConfigError(
        f"it is not said where the run {run} is"
        if not inside
        else f"{run} holds {len(inside)} runs: {', '.join(one.name for one in inside)}",
        why="it is neither a run's directory on an SSD nor the output folder of a run",
        remedy="name one of these, or a run's id and with --ssd all its SSD directories",
    )


def out_of_run(place: RunPlace) -> Path:
    """The output folder that a run's last seal names.

    Raises:
        ConfigError: there is no such run, or it was made without such a folder.
    """
    for run in list_left_runs(place.ssd).runs:
        if run_of(run.run_id)[0] == place.run_id and run.out is not None:
            return Path(run.out)
    raise ConfigError(
        f"the output folder of run {place.run_id} is not known",
        why=f"no seal in {', '.join(map(str, place.ssd))} names it",
        remedy="give the folder that --out named when the run was started",
    )


def runs_in(directory: Path) -> tuple[Path, ...]:
    """The run directories in an SSD directory."""
    found = sorted(directory.glob(f"{_PREFIX}*"))
    return tuple(path for path in found if (path / MANIFEST_NAME).is_file())


def is_run_directory(path: Path) -> bool:
    """Whether a directory is one of a run on an SSD."""
    return path.name.startswith(_PREFIX) and (
        (path / MANIFEST_NAME).is_file() or (path / "lock").is_file()
    )


def _from_record(path: Path) -> RunPlace:
    with storage_errors("a run's record cannot be read", path):
        content = path.read_bytes()
    try:
        fields = json.loads(content)
        return RunPlace(run_id=str(fields["run_id"]), ssd=tuple(map(Path, fields["ssd"])))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not the record of a run",
            why=f"{type(error).__name__}: {error}",
            remedy="name the run's id and its SSD directories (ID --ssd DIR)",
        ) from None


def _from_directory(path: Path) -> RunPlace:
    own = path.resolve()
    run_id = run_of(own.name.removeprefix(_PREFIX))[0]
    try:
        text = (own / MANIFEST_NAME).read_text(encoding="utf-8")
        manifest = Manifest.from_text(text)
    except (OSError, CheckpointError, UnicodeDecodeError):
        # What is wrong with it is told when the run is opened.
        return RunPlace(run_id=run_id, ssd=(own.parent,))
    others = [Path(one).resolve() for one in manifest.directories]
    if manifest.stripe.num_drives == 1 or own not in others:
        return RunPlace(run_id=run_id, ssd=(own.parent,))
    return RunPlace(run_id=run_id, ssd=tuple(one.parent for one in others))


@contextlib.contextmanager
def opened_run(place: RunPlace) -> Iterator[JoinedStates]:
    """Open the last seal of a run, every byte of it compared with its checksum. May block: yes.

    Raises:
        CheckpointError: there is no seal, or a rank's slice is missing.
        Corrupt: bytes are not those that were sealed.
        StorageError: files are missing, or a process is working on the run.
    """
    num_ranks = num_ranks_of(place.ssd, place.run_id)
    with contextlib.ExitStack() as stack:
        engine, _ = choose_engine()
        stack.callback(engine.close)
        stores: list[StateStore] = []
        committed = 0
        for rank in range(num_ranks):
            name = name_of_rank(place.run_id, rank, num_ranks)
            if num_ranks > 1:
                _refuse_missing_slice(place, name, rank)
            run = RunDirectories.attach(place.ssd, name)
            stack.callback(run.close)
            if num_ranks > 1:
                committed = committed or read_commit(run.paths)
                settle_prepared(run.paths, committed)
            stores.append(stack.enter_context(open_states(run, engine=engine)))
            sealed = stores[-1].sealed
            if num_ranks > 1 and sealed is not None:
                refuse_other_seal(sealed, committed, rank)
        yield JoinedStates(stores)


def _refuse_missing_slice(place: RunPlace, name: str, rank: int) -> None:
    if not any((parent / f"{_PREFIX}{name}").is_dir() for parent in place.ssd):
        raise CheckpointError(
            f"the slice of rank {rank} of run {place.run_id} is not in "
            f"{', '.join(map(str, place.ssd))}",
            why=f"each rank keeps its part of every tensor; {_PREFIX}{name} was looked for",
            remedy="name the SSD directories of all ranks with --ssd (copied to one machine if "
            "there were several), or use an archive in OUT",
        )


def export_run(
    place: RunPlace,
    out: Path,
    *,
    model: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    trust_remote_code: bool = False,
    should_merge_adapter: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ModelDirectoryReport:
    """Write the model of a run's last seal, or its adapter, streaming from its states.

    Args:
        should_merge_adapter: write the base with the adapter merged in.
        model: what the run started from; known to the run itself if it was made by a trainer.
        dtype: the run's compute type if not given.

    Raises:
        ConfigError: the model is not known, or not the one of the run.
        CheckpointError, Corrupt, StorageError: as `opened_run` and `export_model`.
    """
    refuse_taken(out)  # opening verifies every byte, which takes its time
    with opened_run(place) as store:
        is_bf16 = store.compute_format is ComputeFormat.BF16
        compute_dtype = torch.bfloat16 if is_bf16 else torch.float16
        said = store.sealed.metadata.get("user", {})
        adapter, names = said.get(ADAPTER), said.get(ADAPTER_TENSORS)
        source, lack = None, ""
        try:
            source = _source_of(place, store.sealed, model, compute_dtype, trust_remote_code)
        except ConfigError as error:
            # The adapter alone is in the states (shapes not, of slices); a model that is named has
            # to be there.
            is_whole = names is not None and store.num_ranks == 1
            if not is_whole or should_merge_adapter or model is not None:
                raise
            lack = f"without the tokenizer, which is the base's: {error.what}"
        adapted: Any = None
        shapes: Mapping[str, tuple[int, ...]] = store.shapes()
        if source is not None:
            if adapter is not None:
                adapted = adapted_skeleton(source.make_model(), adapter)
            shapes = _refuse_other_model(source, adapted, store, place)
            if should_merge_adapter:
                _refuse_unmergeable(adapted, source, place)
        should_leave_base = adapter is not None and not should_merge_adapter
        are_frozen_wanted = True
        if should_leave_base:
            names = saved_names(adapted, is_named=True) if names is None else names
            are_frozen_wanted = not store.trained.issuperset(names.values())
        # Closed here, before the store, whatever becomes of the export.
        with contextlib.closing(  # type: ignore[type-var]
            store.masters(are_frozen_wanted=are_frozen_wanted)
        ) as flat:
            masters = ((name, one.view(shapes[name])) for name, one in flat)
            if should_leave_base:
                report = export_adapter(
                    shapes,
                    names,
                    masters,
                    out,
                    fields=adapter,
                    tokenizer=source.load_tokenizer() if source is not None else None,
                )
                return replace(report, remarks=(*report.remarks, *([lack] if lack else [])))
            assert source is not None
            tensors: Iterator[tuple[str, torch.Tensor]] = masters
            if adapted is not None:
                tensors = merged_tensors(adapted, masters, dtype or compute_dtype)
            return export_model(
                source,
                tensors,
                out,
                buffers=changed_buffers(sealed_buffers(store.sealed)),
                dtype=dtype or compute_dtype,
                max_shard_bytes=max_shard_bytes,
                progress=progress,
            )


def _source_of(
    place: RunPlace,
    sealed: Manifest,
    model: str | None,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> ModelSource:
    # The engine keeps what a trainer seals under "user".
    sealed_by = {**sealed.metadata, **sealed.metadata.get("user", {})}
    found: Any = model if model is not None else sealed_by.get("model")
    if not isinstance(found, str):
        raise ConfigError(
            f"the model run {place.run_id} started from is not known",
            why="its configuration and tokenizer go into the export, and the run does not name it",
            remedy="name it with --model",
        )
    return open_source(
        found,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        head=sealed_by.get("head"),
        should_warn=False,
    )


def check_sealed_folder(sealed: Manifest) -> str | None:
    """Check the folder in OUT that a resume of this seal reads; what to say where it is not there.

    Raises:
        CheckpointError, Corrupt, StorageError: a file in it is missing or not as it was sealed.
    """
    said = sealed.metadata.get("user", {})
    if "checkpoint" not in said or "out" not in said:
        return None
    folder = Path(said["out"]) / said["checkpoint"]
    if not folder.parent.is_dir():
        return f"{folder}, which a resume needs besides the states, is not there to be checked"
    read_resume(folder, said)
    return None


def _refuse_unmergeable(adapted: Any, source: ModelSource, place: RunPlace) -> None:
    if adapted is None:
        raise ConfigError(
            f"run {place.run_id} has no adapter to merge",
            why="all that it trained is the model itself",
            remedy="leave --merged out",
        )
    refuse_unmergeable(adapted, source.parameters)


def _refuse_other_model(
    source: ModelSource, adapted: Any, store: JoinedStates, place: RunPlace
) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of its tensors."""
    found, wanted = store.shapes(), source.parameters
    if adapted is not None:
        wanted = {name: tuple(one.shape) for name, one in adapted.named_parameters()}
    differing = [
        name
        for name, shape in wanted.items()
        if found.get(name) not in (shape, (math.prod(shape),))
    ]
    differing += [name for name in found if name not in wanted]
    if differing:
        raise ConfigError(
            f"run {place.run_id} did not start from {source.directory}: {len(differing)} tensors "
            f"are in one only or of another shape ({shown(differing)})",
            why="the configuration in the export has to be that of the weights",
            remedy="name the model the run started from with --model",
        )
    known = store.sealed.metadata.get("user", {}).get(MODEL_IDENTITY)
    refuse_other_model(
        None if known is None else of_source(known), source.identity, what=f"run {place.run_id}"
    )
    return wanted
