"""OUT/checkpoint-N and run.json: what a run needs to continue, apart from the states.

Owns the names, the content and the checks of these files: trainer state, random generators,
scheduler, arguments, and what the rows and the model were; and what to go on from where the states
cannot be used: the newest copy in OUT that is whole by its checksums. The states themselves are
sealed by the engine, or copied by `archive`. Called by the trainer.

Note "hashes from the seal down". A seal names the hash of the list of its folder's files, the list
names a hash of each, and `read_resume` reads nothing that does not match.
"""

import errno
import json
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lohan.durable_files import publish_directory, restore_directory, write_json
from lohan.errors import (
    CheckpointError,
    ConfigError,
    Corrupt,
    LohanError,
    OtherRanks,
    ShortTransfer,
    StorageError,
)
from lohan.train.weights.archive import INDEX_NAME, check_states
from lohan.train.weights.file_list import (
    LIST_NAME,
    check_files,
    files_below,
    hash_file,
    hash_files,
    read_list,
    read_record,
    write_list,
)
from lohan.train.weights.model_identity import as_json, differences, refuse_other_model
from lohan.working_folder import RUN_NAME, make_working_folder, working_folder

RESUME_NAME = "resume.json"
TRAINER_NAME = "trainer_state.json"
STATES_FOLDER = "states"
REFERENCE_NAME = "reference.safetensors"
"""Of runs that compare with their first weights: what these gave for every row."""
MODEL_KEPT = "is_model_kept"
"""In a resume file: the model in the folder stays when a newer one is sealed."""
VERSION = 2
UNLISTED_VERSION = 1
"""Of folders of older releases, which have no list of their files."""
LIST_HASH = "files_sha256"
"""In a seal: the hash of the list in its folder."""
_RUN_VERSION = 1
# The length of a run may differ where that changes nothing of what is done (`continuing`).
_LENGTH = frozenset(("max_steps", "num_train_epochs"))
_INDEX = f"{STATES_FOLDER}/{INDEX_NAME}"
# Arguments that change no bit of the weights, so they may differ when a run is continued.
_MAY_DIFFER = frozenset(
    (
        "output_dir",
        "overwrite_output_dir",
        "resume_from_checkpoint",
        "restore_callback_states_from_checkpoint",  # they are, always
        "do_train",
        "do_eval",
        "do_predict",
        "local_rank",
        "logging_dir",
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "log_on_each_node",
        "log_level",
        "log_level_replica",
        "logging_nan_inf_filter",
        "disable_tqdm",
        "report_to",
        "run_name",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "include_num_input_tokens_seen",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_on_each_node",
        "push_to_hub",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "dataset_num_proc",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "activation_offloading",
        "debug",
        "skip_memory_metrics",
        "torch_empty_cache_steps",
        "dataloader_pin_memory",
        "use_cpu",
        "dataloader_prefetch_factor",
        "dataloader_persistent_workers",
        "ddp_timeout",
    )
)
# The drive or its files are gone. Others (a run somebody holds, no permission) go away by
# themselves, and a copy would only lose steps.
_GONE = (errno.ENOENT, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.ENOTDIR)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """run.json: which states on which SSDs belong to this folder."""

    run_id: str
    ssd: tuple[str, ...]

    def write(self, out: pathlib.Path) -> None:
        """Write it. May block: yes."""
        fields = {"version": _RUN_VERSION, "run_id": self.run_id, "ssd": list(self.ssd)}
        write_json(make_working_folder(out) / RUN_NAME, fields)


def read_run(out: pathlib.Path) -> RunRecord | None:
    """The record in OUT, or None if no run ever started there.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = working_folder(out) / RUN_NAME
    if not path.exists():
        return None
    return read_record(
        path,
        RunRecord,
        versions=(_RUN_VERSION,),
        why="it names the states that belong to this folder",
        remedy="restore it, or start in another folder",
    )


def checkpoint_name(step: int) -> str:
    """`checkpoint-12`, as transformers calls it."""
    return f"checkpoint-{step}"


def write_files_list(folder: pathlib.Path) -> str:
    """List all files of a finished checkpoint folder; returns the hash of the list for the seal.

    The files of a copy of states are listed by its own index. May block: yes, all are read.
    """
    names = [
        name
        for name in files_below(folder)
        if name == _INDEX or not name.startswith(f"{STATES_FOLDER}/")
    ]
    return write_list(folder / LIST_NAME, hash_files(folder, names))


def read_resume(checkpoint: pathlib.Path, seal: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the resume file of a checkpoint folder, after comparing what a resume reads there.

    Args:
        seal: what the seal that names the folder says about it.

    Raises:
        CheckpointError: it is missing, damaged or of another version.
        Corrupt: a file is not the one that was written.
    """
    restore_directory(checkpoint)
    path, listed = checkpoint / RESUME_NAME, checkpoint / LIST_NAME
    sealed_hash = (seal or {}).get(LIST_HASH)
    is_listed = sealed_hash is not None or listed.exists()
    if is_listed:
        files = read_list(listed)
        if sealed_hash is not None and hash_file(listed) != sealed_hash:
            raise Corrupt(
                f"{listed.name} is not the list that was sealed",
                why="it was damaged or changed, or is of another run",
                remedy="restore the folder, or resume from another checkpoint",
                path=str(listed),
            )
        index = (_INDEX,) if has_archive(checkpoint) else ()
        reference = (REFERENCE_NAME,) if REFERENCE_NAME in files else ()
        check_files(checkpoint, files, (RESUME_NAME, TRAINER_NAME, *index, *reference))
    found = read_record(
        path,
        dict[str, Any],
        versions=(VERSION, UNLISTED_VERSION),
        why="it holds the random generators, the schedule and the arguments of the run",
        remedy="restore the folder, or resume from another checkpoint",
    )
    if found["version"] == VERSION and not is_listed:
        raise CheckpointError(
            f"{listed} is missing",
            why="without the hashes in it damaged files would not be told from whole ones",
            remedy="copy the whole folder again, or resume from another checkpoint",
        )
    return found


def read_state(checkpoint: pathlib.Path) -> dict[str, Any]:
    """transformers' state of a checkpoint folder that `read_resume` has read."""
    found = json.loads((checkpoint / TRAINER_NAME).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def model_files(files: Iterable[str]) -> list[str]:
    """The files of a checkpoint folder that are its model, where it has one."""
    own = (RESUME_NAME, TRAINER_NAME, REFERENCE_NAME)
    return [n for n in files if n not in own and not n.startswith(f"{STATES_FOLDER}/")]


def check_checkpoint(checkpoint: pathlib.Path) -> None:
    """Read every file of a checkpoint folder, with the copy of states in it. May block: yes.

    Raises:
        CheckpointError, Corrupt, StorageError: as `read_resume` and `check_states`.
    """
    if read_resume(checkpoint)["version"] != UNLISTED_VERSION:
        check_files(checkpoint, read_list(checkpoint / LIST_NAME))
    if has_archive(checkpoint):
        check_states(checkpoint / STATES_FOLDER)


def has_archive(checkpoint: pathlib.Path) -> bool:
    """Whether the folder holds a whole copy of the states."""
    return (checkpoint / STATES_FOLDER).is_dir()


def publish(temporary: pathlib.Path, out: pathlib.Path, step: int) -> pathlib.Path:
    """Give a finished checkpoint folder its name."""
    path = out / checkpoint_name(step)
    if path.exists() and not (path / RESUME_NAME).exists():
        raise _foreign(path)
    publish_directory(temporary, path)
    return path


def refuse_foreign_checkpoints(out: pathlib.Path, num_steps: int | None) -> None:
    """Refuse, before a run begins, folders of others where its checkpoints belong.

    Raises:
        CheckpointError: one is of a step that the run will have, or may have.
    """
    for path in sorted(out.glob("checkpoint-*")):
        step = path.name.removeprefix("checkpoint-")
        if not step.isdigit() or (path / RESUME_NAME).exists():
            continue
        if num_steps is None or int(step) <= num_steps:
            raise _foreign(path)


def _foreign(path: pathlib.Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is there and was not written by lohan",
        why="a checkpoint of this run belongs there, and nothing of others is replaced",
        remedy="move it away, or use another output folder",
    )


def checkpoints(out: pathlib.Path) -> list[pathlib.Path]:
    """Checkpoint folders of lohan in OUT, oldest first."""
    found = []
    for path in out.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdigit() and (path / RESUME_NAME).exists():
            found.append((int(step), path))
    return [path for _, path in sorted(found)]


def remove_old(
    out: pathlib.Path,
    *,
    newest: pathlib.Path,
    best: str | None = None,
    save_total_limit: int | None,
) -> None:
    """Delete what no resume can use: small folders of older seals; archives and models that were
    asked for past the limit.

    Args:
        best: the folder of the best model so far, which stays.
    """
    kept = (newest.name, pathlib.PurePath(best).name if best is not None else None)
    _remove_halves(out)
    asked = []
    for path in checkpoints(out):
        if has_archive(path) or _keeps_model(path):
            asked.append(path)
        elif path.name not in kept:
            _remove(path)
    if save_total_limit is not None and save_total_limit > 0:
        for path in asked[:-save_total_limit]:
            if path.name not in kept:
                _remove(path)


def _keeps_model(path: pathlib.Path) -> bool:
    try:
        return bool(json.loads((path / RESUME_NAME).read_text("utf-8")).get(MODEL_KEPT))
    except ValueError:
        return True  # damaged, so nobody knows what it was to be


def _remove(path: pathlib.Path) -> None:
    """Delete a folder. Of a process killed half-way the rest has a name that is looked for."""
    doomed = path.rename(path.with_name(f".{path.name}.tmp"))
    shutil.rmtree(doomed)


def _remove_halves(out: pathlib.Path) -> None:
    """Delete what a process that was killed while saving left under names nobody looks for."""
    for path in out.glob(".checkpoint-*.old"):
        restore_directory(out / path.name.removeprefix(".").removesuffix(".old"))
    for pattern in (".checkpoint-*.old", ".checkpoint-*.tmp"):
        for path in out.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def refuse_changes(
    checkpoint: pathlib.Path,
    sealed: Mapping[str, Any],
    *,
    arguments: Mapping[str, Any],
    model: Mapping[str, Any],
    data_hash: str | None,
    may_differ: frozenset[str] = frozenset(),
) -> None:
    """Refuse to continue with other arguments, another model or other data; show the difference.

    Raises:
        ConfigError: something that decides the weights is not what it was.
    """
    changed = differences(sealed["arguments"], arguments, but=_MAY_DIFFER | _LENGTH | may_differ)
    if changed:
        raise ConfigError(
            f"{len(changed)} setting(s) are not those of {checkpoint}: " + "; ".join(changed),
            why="the run would not continue the one that was stopped",
            remedy="put them back, or start a new run in another folder (from what this one has "
            "learned: `lohan export` writes its model, for --model)",
        )
    refuse_other_model(sealed.get("model"), model, what=str(checkpoint))
    if sealed["data_hash"] is not None and sealed["data_hash"] != data_hash:
        raise ConfigError(
            f"the training rows are not those of {checkpoint}: {sealed['data_hash'][:12]} then, "
            f"{(data_hash or 'unknown')[:12]} now",
            why="the rows already seen are skipped by counting, so other rows would be skipped",
            remedy="bring the data, tokenizer and chat template back, or start a new run in "
            "another folder",
        )


def comparable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as JSON gives them back; what JSON cannot hold becomes its text."""
    found = as_json(arguments)
    return {name: value for name, value in found.items() if name not in _MAY_DIFFER}


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
