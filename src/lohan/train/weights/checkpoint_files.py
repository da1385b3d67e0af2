"""Which files of a directory are the weights, and whether all of them are there.

Owns the index, the match between index, files and headers, and the refusal of pickles. Reads
headers only. What the tensors mean to a model is `checkpoint_names`' business.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from lohan.errors import CheckpointError, ConfigError
from lohan.ssd.engines.storage_errors import storage_errors
from lohan.train.weights.safetensors_files import StoredTensor, read_header

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MOST_SHOWN = 8


def find_stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a model directory by their stored names, in the order of files and bytes.

    Raises:
        ConfigError: there are no safetensors files, only pickles or nothing.
        CheckpointError: the index and the files do not agree; what is missing is named.
        StorageError: a file is cut off, damaged or cannot be read; file and tensor are named.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        return _by_index(directory, _read_index(index))
    if (directory / SINGLE_NAME).is_file():
        return {tensor.name: tensor for tensor in read_header(directory / SINGLE_NAME)}
    shards = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    if len(shards) == 1:
        return {tensor.name: tensor for tensor in read_header(shards[0])}
    if shards:
        raise CheckpointError(
            f"{directory} holds {len(shards)} safetensors files and no {INDEX_NAME}",
            why=f"the index says which of them are the model ({shown(p.name for p in shards)})",
            remedy=f"download the index too; a model in one file is called {SINGLE_NAME}",
        )
    raise _no_weights(directory)


def has_all_files(directory: Path) -> bool:
    """Whether every weights file the index names is there; without an index, any that is one.

    Raises:
        CheckpointError: the index is damaged.
        StorageError: it cannot be read.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        return all((directory / file).is_file() for file in set(_read_index(index).values()))
    return any(directory.glob("*.safetensors"))


def stated_bytes(directory: Path) -> int | None:
    """What all weights files hold, as the index says it; None where it does not."""
    try:
        found = json.loads((directory / INDEX_NAME).read_text(encoding="utf-8"))
        total = found["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # nobody has to write it
    return int(total) if isinstance(total, int | float) and total > 0 else None


def _no_weights(directory: Path) -> ConfigError:
    pickles = sorted(path.name for kind in _PICKLES for path in directory.glob(kind))
    if pickles:
        return ConfigError(
            f"{directory} holds its weights as pickles only ({shown(pickles)})",
            why="opening a pickle runs whatever code is in it, so lohan never does",
            remedy="use a safetensors version of the model, or make one where you trust the file: "
            "AutoModel.from_pretrained(...).save_pretrained(...) of transformers writes "
            "safetensors",
        )
    with storage_errors("a model directory cannot be read", directory):
        names = sorted(path.name for path in directory.iterdir())
    return ConfigError(
        f"{directory} holds no weights",
        why=f"{SINGLE_NAME} or {INDEX_NAME} was looked for; it holds {shown(names) or 'nothing'}",
        remedy="give the directory of a transformers model with its safetensors files",
    )


def _read_index(path: Path) -> Mapping[str, str]:
    with storage_errors("an index cannot be read", path):
        text = path.read_bytes()
    try:
        weight_map = json.loads(text.decode())["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("its weight_map is empty or not an object")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"tensor {name} is said to be in {file!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not an index",
            why=f"{type(error).__name__}: {error}",
            remedy="download that file again",
        ) from None
    return weight_map


def _by_index(directory: Path, weight_map: Mapping[str, str]) -> dict[str, StoredTensor]:
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (directory / file).is_file()]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of {len(files)} weights files are missing in {directory}: "
            f"{shown(absent)}",
            why=f"{INDEX_NAME} says that tensors are in them",
            remedy="download or copy the missing files",
        )
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in read_header(directory / file):
            # A file may hold more than the index names; the index decides.
            if weight_map.get(tensor.name) == file:
                found[tensor.name] = tensor
    lacking = [name for name in weight_map if name not in found]
    if lacking:
        raise CheckpointError(
            f"{len(lacking)} tensors are not in the files {INDEX_NAME} says they are in: "
            + shown(f"{name} ({weight_map[name]})" for name in lacking),
            why=f"files and index in {directory} are not of the same model",
            remedy="download index and files again, all of them from one place",
        )
    return found


def shown(names: Iterable[str]) -> str:
    """A list for a message: the first few, and how many more there are."""
    listed = list(names)
    text = ", ".join(listed[:_MOST_SHOWN])
    return f"{text} and {len(listed) - _MOST_SHOWN} more" if len(listed) > _MOST_SHOWN else text
