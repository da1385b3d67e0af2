"""A complete copy of the states in a checkpoint folder: fp32 masters, both moments, buffers.

Owns the files in `states/`: safetensors shards, the model's buffers as in a seal, and an index with
a hash of each, written last; the index itself is named by the list of the folder (`file_list`).
They are written and read one tensor at a time. Called by `saving`; the model beside them is
written by `export_hf`.
"""

import contextlib
import json
import pathlib
from collections.abc import Iterator
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
    index = _index(folder)
    stored = {
        kind: {
            one.name: one
            for file in sorted(index.files)
            if file.startswith(f"{kind}-")
            for one in read_header(folder / file)
        }
        for kind in (_MASTERS, _MEANS, _SQUARES)
    }

    def moments(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if name not in stored[_MEANS] or name not in stored[_SQUARES]:
            raise CheckpointError(
                f"the copy has no moments of {name}",
                why="it is of a model with other parameters",
                remedy="resume with the model and settings the run began with",
            )
        return read_tensor(stored[_MEANS][name]), read_tensor(stored[_SQUARES][name])

    buffers = {}  # copies of older releases have none
    if BUFFERS_NAME in index.files:
        buffers = json.loads((folder / BUFFERS_NAME).read_text(encoding="utf-8"))
    return FirstStates(
        weights=((one.name, read_tensor(one)) for one in stored[_MASTERS].values()),
        moments=moments,
        counters=index.counters,
        buffers=buffers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    files: dict[str, str]
    counters: dict[str, Any]


def _index(folder: pathlib.Path) -> _Index:
    why = "it names the files of the copy and their checksums"
    return read_record(folder / INDEX_NAME, _Index, versions=(VERSION,), why=why)
