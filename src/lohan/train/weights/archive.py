"""A complete copy of the states in a checkpoint folder: fp32 masters, both moments, buffers.

Owns the files in `states/`: safetensors shards, the model's buffers as in a seal, and an index with
a hash of each, written last; the index itself is named by the list of the folder (`file_list`).
They are written and read one tensor at a time. Called by `saving`; the model beside them is
written by `export_hf`.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lohan.durable_files import write_json
from lohan.engine.options import FirstStates
from lohan.errors import CheckpointError
from lohan.train.weights.export_hf import cut_shards
from lohan.train.weights.file_list import check_files, hash_files, read_record
from lohan.train.weights.safetensors_files import (
    ShardWriter,
    StoredTensor,
    read_header,
    read_tensor,
)
from lohan.units import GB

INDEX_NAME = "index.json"
BUFFERS_NAME = "buffers.json"
VERSION = 1
_SHARD_BYTES = 5 * GB
_MASTERS, _MEANS, _SQUARES = "P32", "M32", "V32"


def write_states(engine: Any, shapes: dict[str, tuple[int, ...]], folder: pathlib.Path) -> None:
    """Copy masters and moments. May block: yes, for as long as reading and writing them takes.

    Args:
        engine: gives the states, one tensor at a time.
        shapes: of every parameter the engine trains.
        folder: made here.

    Raises:
        OutOfSpace, StorageError: the copy cannot be written.
    """
    folder.mkdir()
    with contextlib.ExitStack() as files:
        places: dict[tuple[str, str], tuple[ShardWriter, StoredTensor]] = {}
        writers: list[ShardWriter] = []
        # All space is reserved before the first tensor is read.
        for kind in (_MASTERS, _MEANS, _SQUARES):
            wanted = [(name, torch.float32, shape) for name, shape in shapes.items()]
            for number, content in enumerate(cut_shards(wanted, _SHARD_BYTES).values(), start=1):
                writer = ShardWriter(folder / f"{kind}-{number:05d}.safetensors", content)
                files.callback(writer.close)
                writers.append(writer)
                places |= {(kind, place.name): (writer, place) for place in writer.places}
        for kind, name, tensor in states_of(engine):
            writer, place = places.pop((kind, name))
            writer.write(place, tensor)
            del tensor  # no room for two
        if places:
            kind, name = next(iter(places))
            raise CheckpointError(
                f"{kind} of {name} did not come from the engine",
                why="the copy would not be whole",
                remedy="report this; the states on the SSDs are untouched",
            )
        for writer in writers:
            writer.finish()
    write_json(folder / BUFFERS_NAME, engine.buffers)
    paths = [*(writer.path for writer in writers), folder / BUFFERS_NAME]
    found = hash_files(folder, [path.name for path in paths])
    index = {"version": VERSION, "files": found, "counters": dict(engine.counters)}
    write_json(folder / INDEX_NAME, index)


def states_of(engine: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
    """All that is copied: kind, name and tensor, one at a time."""
    for name, *masters in engine.weights(are_frozen_wanted=False):
        yield _MASTERS, name, masters.pop()
    for name, *moments in engine.moments():
        yield _MEANS, name, moments.pop(0)
        yield _SQUARES, name, moments.pop()


def check_states(folder: pathlib.Path) -> None:
    """Read every file of a copy and compare checksums. May block: yes.

    Raises:
        CheckpointError: the index is missing or damaged, or a file is missing.
        Corrupt: a file does not have the bytes that were written; it is named.
    """
    check_files(folder, _index(folder).files)


def read_copy(folder: pathlib.Path) -> FirstStates:
    """What an engine takes to go on from a copy.

    Raises as `check_states`, which comes first. May block: yes.
    """
    check_states(folder)
    return FirstStates(
        weights=read_masters(folder),
        moments=ArchivedMoments(folder),
        counters=read_counters(folder),
        buffers=read_buffers(folder),
    )


def read_masters(folder: pathlib.Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The fp32 masters of a copy, one at a time."""
    for stored in _stored(folder, _MASTERS):
        yield stored.name, read_tensor(stored)


class ArchivedMoments:
    """Both moments of a parameter by its name, read when asked for."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._means = {stored.name: stored for stored in _stored(folder, _MEANS)}
        self._squares = {stored.name: stored for stored in _stored(folder, _SQUARES)}

    def __call__(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Read them. Raises CheckpointError for a parameter the copy does not know."""
        if name not in self._means or name not in self._squares:
            raise CheckpointError(
                f"the copy has no moments of {name}",
                why="it is of a model with other parameters",
                remedy="resume with the model and settings the run began with",
            )
        return read_tensor(self._means[name]), read_tensor(self._squares[name])


def read_counters(folder: pathlib.Path) -> dict[str, Any]:
    """The engine's own counters when the copy was made."""
    return _index(folder).counters


def read_buffers(folder: pathlib.Path) -> dict[str, Any]:
    """The model's buffers when the copy was made; none in copies of older releases."""
    if BUFFERS_NAME not in _index(folder).files:
        return {}
    found = json.loads((folder / BUFFERS_NAME).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def _stored(folder: pathlib.Path, kind: str) -> Iterable[StoredTensor]:
    for name in sorted(_index(folder).files):
        if name.startswith(f"{kind}-"):
            yield from read_header(folder / name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    files: dict[str, str]
    counters: dict[str, Any]


def _index(folder: pathlib.Path) -> _Index:
    why = "it names the files of the copy and their checksums"
    return read_record(folder / INDEX_NAME, _Index, versions=(VERSION,), why=why)
