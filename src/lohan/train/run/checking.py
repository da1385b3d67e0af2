"""Is what lies in a directory whole: a model, copies of states beside it, or states of runs.

Owns telling them apart. Single checks are those of `sealed_runs`, `resume_point` and of
`train.weights`. Called by `lohan check`.
"""

import errno
import pathlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial

from lohan.errors import ConfigError, LohanError
from lohan.store.seals.commits import num_ranks_of
from lohan.train.adapters.adapter_files import check_adapter_directory, is_adapter_directory
from lohan.train.run.resume_point import (
    RESUME_NAME,
    check_checkpoint,
    checkpoints,
    has_archive,
    read_run,
)
from lohan.train.run.sealed_runs import (
    RunPlace,
    check_sealed_folder,
    find_run,
    is_run_directory,
    opened_run,
    runs_in,
)
from lohan.train.weights.check_export import check_model_directory
from lohan.train.weights.file_list import MODEL_LIST_NAME, check_files, read_list
from lohan.units import format_bytes
from lohan.working_folder import working_folder

# They say nothing about the bytes.
_IN_THE_WAY = (errno.EWOULDBLOCK, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE)


def check_directory(
    directory: pathlib.Path, ssd: Sequence[pathlib.Path], *, quick: bool, trust_remote_code: bool
) -> list[dict[str, object]]:
    """What was found, one report each: facts by name, then `problems` and `remarks`.

    Where not `is_checked` the problem is in the way (a process at work, a drive mounted read-only).

    Args:
        ssd: the SSD directories of a run that is named by its id, or has moved.
        quick: of a model, headers only and not every value.

    Raises:
        ConfigError: there is nothing to check.
    """
    if not directory.is_dir() and not ssd:
        raise ConfigError(
            f"{directory} is not a directory",
            why="a model or the states of a run are directories",
            remedy="check the path, or name the SSD directories of a run's id with --ssd",
        )
    found = _runs(directory, ssd)
    if not found and not any(directory.glob("*.gguf")) and not _is_model(directory):
        raise ConfigError(
            f"{directory} holds neither a model nor runs",
            why="config.json, *.safetensors, *.gguf and lohan-* were looked for",
            remedy="check the path",
        )
    if found:
        return [_check_run(place) for place in found]
    return [_check_model(directory, quick=quick, trust_remote_code=trust_remote_code)]


def _is_model(directory: pathlib.Path) -> bool:
    return (directory / "config.json").is_file() or any(directory.glob("*.safetensors"))


def _runs(directory: pathlib.Path, ssd: Sequence[pathlib.Path]) -> list[RunPlace]:
    if not directory.is_dir():
        return [find_run(str(directory), ssd)]
    is_unfinished = read_run(directory) is not None and not _is_model(directory)
    if is_run_directory(directory) or is_unfinished:
        return [find_run(str(directory), ssd)]
    return list(dict.fromkeys(find_run(str(path), ssd) for path in runs_in(directory)))


def _check_run(place: RunPlace) -> dict[str, object]:
    num_ranks = num_ranks_of(place.ssd, place.run_id)
    what = "states of a run" + (f" of {num_ranks} ranks" if num_ranks > 1 else "")
    facts: dict[str, object] = {"what": what, "run": place.run_id}
    problems: list[str] = []
    remarks: list[str] = []
    is_checked = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with opened_run(place) as store:
                facts["sealed step"] = store.sealed.step
                facts["seal"] = store.sealed.seal_number
                facts["tensors"] = len(store.shapes())
                facts["verified"] = format_bytes(store.state_bytes)
                said = check_sealed_folder(store.sealed)
                remarks = [] if said is None else [said]
        except LohanError as error:
            problems.append(f"{error.what}: {error.why}. To fix it: {error.remedy}")
            is_checked = getattr(error, "errno", None) not in _IN_THE_WAY
    facts["directories"] = ", ".join(str(path) for path in place.ssd)
    remarks += [str(one.message) for one in caught]
    return {**facts, "is_checked": is_checked, "problems": problems, "remarks": remarks}


def _check_model(
    directory: pathlib.Path, *, quick: bool, trust_remote_code: bool
) -> dict[str, object]:
    if is_adapter_directory(directory):
        report = check_adapter_directory(directory, should_read_values=not quick)
    else:
        report = check_model_directory(
            directory, should_read_values=not quick, trust_remote_code=trust_remote_code
        )
    found = [] if quick else _check_files(directory)
    num_copies = sum(map(has_archive, [directory, *checkpoints(directory)]))
    return {
        "what": "model"
        + (f" with {num_copies} copies of states" if num_copies and not quick else ""),
        "directory": str(report.path),
        "architecture": report.architecture or "not known",
        "files": report.num_files,
        "tensors": report.num_tensors,
        "parameters": report.num_parameters,
        "size": format_bytes(report.total_bytes),
        "number types": ", ".join(f"{count} {name}" for name, count in report.dtypes.items()),
        "is_checked": True,
        "problems": [*report.problems, *found],
        "remarks": list(report.remarks),
    }


def _check_files(directory: pathlib.Path) -> list[str]:
    """What is wrong with files whose hashes are known: an archive, or a run's model and folders."""
    listed = working_folder(directory) / MODEL_LIST_NAME
    checks: list[Callable[[], None]] = [
        partial(check_checkpoint, path) for path in checkpoints(directory)
    ]
    if (directory / RESUME_NAME).is_file():
        checks.append(partial(check_checkpoint, directory))
    if listed.is_file():
        checks.append(lambda: check_files(directory, read_list(listed)))
    found = []
    for check_one in checks:
        try:
            check_one()
        except LohanError as error:
            found.append(f"{error.what}: {error.why}. To fix it: {error.remedy}")
    return found
