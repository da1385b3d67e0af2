"""A trained model out of a stream of tensors, in Hugging Face's layout, whole or not at all.

Owns the order of an export: the way back from the model's names to those its checkpoint uses and
the cut into shards, checks of place and space, all space reserved, tensors written as they come,
files made durable, the result checked, then renamed into place. The files beside the weights are
`carried_files`'. Called by trainers and by `lohan export`.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import EBUSY, ENOENT, ENOTDIR, ENOTEMPTY
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.engine.model_buffers import persistent_buffers
from lohan.errors import CheckpointError, ConfigError, OutOfSpace, StorageError
from lohan.ssd.engines.storage_errors import storage_errors
from lohan.ssd.runs.partial_directory import partial_directory
from lohan.train.weights import meta_model
from lohan.train.weights.carried_files import write_carried_files
from lohan.train.weights.check_export import ModelDirectoryReport, check_model_directory
from lohan.train.weights.checkpoint_files import INDEX_NAME, SINGLE_NAME, shown
from lohan.train.weights.checkpoint_names import (
    NameGroup,
    NameMatch,
    default_names,
    match_names,
    to_stored,
)
from lohan.train.weights.file_list import MODEL_LIST_NAME, files_below, hash_files, write_list
from lohan.train.weights.safetensors_files import ShardWriter, StoredTensor
from lohan.train.weights.source import ModelSource, source_of_config
from lohan.units import GB, MB, format_bytes

MAX_SHARD_BYTES = 5 * GB
EXPORT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LIBRARY = "transformers."
_CONFIGURATIONS = ("config.json", "adapter_config.json")
_BESIDE_BYTES = 64 * MB
"""Left free for configuration, tokenizer and the filesystem's own records."""
FileTensor = tuple[str, torch.dtype, tuple[int, ...]]
"""Stored name, type and shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLayout:
    """All tensors of an export."""

    skeleton: nn.Module
    match: NameMatch
    aliases: Mapping[str, str]
    """For every name of a parameter the one it comes under."""
    groups: tuple[NameGroup, ...]
    """What is written, each group as a whole."""
    tensors: tuple[FileTensor, ...]

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes that have to come in."""
        known = self.skeleton.state_dict()
        return {
            self.aliases.get(name, name): tuple(known[name].shape)
            for group in self.groups
            for name in group.owned
        }

    def stored(
        self, group: NameGroup, owned: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """A group as it is written."""
        return to_stored(self.skeleton, group, self.match, owned)


def export_model(
    source: ModelSource | Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    *,
    buffers: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer: Any = None,
    should_merge: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ModelDirectoryReport:
    """Write a model that `from_pretrained` loads; one tensor is in RAM at a time.

    Nothing appears at `out` before all of it is written, durable and checked. What fails is
    removed; a process that is killed leaves a hidden directory beside `out` (in it for a merge),
    which the next export removes.

    Args:
        source: the model training started from; or, for one that was made in this process, the
            module (of a class of one's own: its tensors, and its configuration if it has one) or
            transformers' configuration.
        tensors: every parameter once, by the name it is trained under, in any order.
        buffers: persistent buffers that training changed; the others are those of the source.
        out: a directory that is not there yet, or is empty.
        dtype: bf16, fp16 or fp32; rounded to nearest even.
        tokenizer: saved instead of the source's.
        should_merge: put the files into `out` as it is, beside what is there. The files of an older
            model are replaced; config.json comes last, so until then it is no model.
        progress: called with bytes written and bytes in all.

    Raises:
        ConfigError: a tensor is unknown, twice, missing or of another shape; nothing is left.
        OutOfSpace: there is not enough room; nothing was written.
        StorageError: `out` is taken or cannot be written.
        CheckpointError: what was written is not a whole model, or a tensor is NaN throughout.
    """
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(
            f"{dtype} is not a type to export in",
            why="weights are written as bf16, fp16 or fp32",
            remedy="use torch.bfloat16",
        )
    out = Path(os.path.realpath(out))
    is_merge = should_merge and out.is_dir()
    refuse_taken(out, should_merge=should_merge)
    if isinstance(source, torch.nn.Module) and not type(source).__module__.startswith(_LIBRARY):
        return _export_own(source, tensors, out, dtype, tokenizer, is_merge=is_merge)
    source = _as_source(source)
    layout = export_layout(source, dtype)
    shards = cut_shards(layout.tensors, max_shard_bytes)
    _refuse_full(out if is_merge else out.parent, layout.tensors)
    with partial_directory(out, is_merge) as partial:
        with contextlib.ExitStack() as files:
            writers = []
            for name, content in shards.items():
                writers.append(ShardWriter(partial / name, content))
                files.callback(writers[-1].close)
            _write_tensors(source, layout, writers, tensors, buffers or {}, progress)
            for writer in writers:
                writer.finish()
        if len(shards) > 1:
            _write_index(partial / INDEX_NAME, layout, writers)
        write_carried_files(source, partial, dtype=dtype, tokenizer=tokenizer)
        report = check_model_directory(
            partial, should_read_values=False, trust_remote_code=source.trust_remote_code
        )
        if report.problems or report.unexpected:
            raise CheckpointError(
                f"the model written for {out} is not whole",
                why=shown((*report.problems, *report.unexpected)),
                remedy="report this, with the name of the model; the trained states are untouched",
            )
        written = tuple(files_below(partial))
        if not is_merge:  # into a folder of a run or a checkpoint, which has a list of its own
            write_files_list(partial, written)
        place_model(partial, out, is_merge=is_merge)
    return dataclasses.replace(report, path=out, files=written)


def exported_as(model: torch.nn.Module) -> Any:
    """What of a module is to be exported: its configuration, where that means a class that
    transformers knows and the module's own is a user's over it; the module itself everywhere
    else, since which class is meant is known of language models only."""
    config = getattr(model, "config", None)
    if not type(model).__module__.startswith(_LIBRARY):
        with contextlib.suppress(ConfigError):
            meta_model.model_class(config, Path(), trust_remote_code=False)
            return config
    return model


def _as_source(given: Any) -> ModelSource:
    if isinstance(given, torch.nn.Module):
        return source_of_config(given.config, kind=type(given))
    return given if isinstance(given, ModelSource) else source_of_config(given)


def _export_own(
    model: torch.nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    out: Path,
    dtype: torch.dtype,
    tokenizer: Any,
    *,
    is_merge: bool,
) -> ModelDirectoryReport:
    """Write a module of a class that no library has: one file, with the names it has itself."""
    buffers = persistent_buffers(model)
    own = [(name, dtype, tuple(one.shape)) for name, one in model.named_parameters()]
    own += [(name, one.dtype, tuple(one.shape)) for name, one in buffers.items()]
    _refuse_full(out if is_merge else out.parent, own)
    with partial_directory(out, is_merge) as partial:
        with contextlib.closing(ShardWriter(partial / SINGLE_NAME, own)) as writer:
            places = {place.name: place for place in writer.places}
            for name, tensor in chain(tensors, buffers.items()):
                writer.write(places.pop(name), tensor)
            if places:
                raise _incomplete(places)
            writer.finish()
        parts: tuple[Any, ...] = (getattr(model, "config", None), tokenizer)
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(str(partial))
        written = tuple(files_below(partial))
        place_model(partial, out, is_merge=is_merge)
    report = ModelDirectoryReport.of(out, type(model).__name__, writer.places)
    return dataclasses.replace(report, files=written)


class _Intake:
    """Takes tensors in any order and writes each group when it is complete."""

    def __init__(self, layout: ExportLayout, writers: list[ShardWriter]) -> None:
        self._layout = layout
        self._places: dict[str, tuple[ShardWriter, StoredTensor]] = {
            place.name: (writer, place) for writer in writers for place in writer.places
        }
        self._groups: dict[str, list[NameGroup]] = {}
        for group in layout.groups:
            for name in group.owned:
                self._groups.setdefault(layout.aliases.get(name, name), []).append(group)
        self._held: dict[str, torch.Tensor] = {}
        self.wanted = layout.wanted
        self.missing = dict(self.wanted)
        self.written_bytes = 0

    def take(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self.wanted:
            raise ConfigError(
                f"the tensor {name} is not one of the model's",
                why="tensors are given by the names they are trained under",
                remedy="export with the model the run started from",
            )
        if name not in self.missing:
            raise ConfigError(
                f"the tensor {name} was given twice",
                why="only one of both can be written",
                remedy="give every tensor once",
            )
        if tuple(tensor.shape) != self.wanted[name]:
            raise ConfigError(
                f"the tensor {name} has the shape {list(tensor.shape)}, the model's is "
                f"{list(self.wanted[name])}",
                why="the tensors are not of this model",
                remedy="export with the model the run started from",
            )
        del self.missing[name]
        for group in self._groups[name]:
            self._held[name] = tensor
            names = [self._layout.aliases.get(owned, owned) for owned in group.owned]
            if all(one in self._held for one in names):
                owned = {own: self._held[one] for own, one in zip(group.owned, names, strict=True)}
                for one in names:
                    del self._held[one]
                self._write(group, owned)

    def _write(self, group: NameGroup, owned: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._layout.stored(group, owned).items():
            writer, place = self._places[name]
            refuse_all_nan(name, tensor)
            writer.write(place, tensor)
            self.written_bytes += place.nbytes


def refuse_all_nan(name: str, tensor: torch.Tensor) -> None:
    """Refuse to write a tensor without a single number.

    Raises:
        CheckpointError: it is NaN throughout.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_floating_point() and bool(flat[0].isnan()) and bool(flat.isnan().all()):
        raise CheckpointError(
            f"the tensor {name} is NaN in all of its {flat.numel()} elements",
            why="such a model is of no use, so it is not written",
            remedy="look in the log for the step at which the loss became NaN, and resume "
            "from a seal before it",
        )


def _write_tensors(
    source: ModelSource,
    layout: ExportLayout,
    writers: list[ShardWriter],
    tensors: Iterable[tuple[str, torch.Tensor]],
    buffers: Mapping[str, torch.Tensor],
    progress: Callable[[int, int], None] | None,
) -> None:
    intake = _Intake(layout, writers)
    total_bytes = sum(place.nbytes for writer in writers for place in writer.places)
    for name, tensor in tensors:
        intake.take(name, tensor)
        del tensor
        if progress is not None:
            progress(intake.written_bytes, total_bytes)
    for name, buffer in buffers.items():
        # A buffer that the source has no place for is one its model can do without.
        if name in intake.missing:
            intake.take(name, buffer.detach().cpu())
    parameters = source.parameters
    if any(name not in parameters for name in intake.missing):
        for name, buffer in _buffers(source):
            if name in intake.missing:
                intake.take(name, buffer)
    if intake.missing:
        raise _incomplete(intake.missing)


def _incomplete(missing: Iterable[str]) -> ConfigError:
    names = list(missing)
    return ConfigError(
        f"{len(names)} tensors of the model were not given: {shown(names)}",
        why="the exported model would be incomplete",
        remedy="export with the model the run started from",
    )


def _buffers(source: ModelSource) -> Iterator[tuple[str, torch.Tensor]]:
    if source.match is not None:
        yield from source.buffers()
    else:
        yield from persistent_buffers(source.make_model()).items()


def refuse_taken(out: Path, *, should_merge: bool = False) -> None:
    """Refuse an output that cannot be taken, before time is spent on it.

    Raises:
        StorageError: naming the path and what to do.
    """
    if not out.parent.is_dir():
        why = f"there is no directory {out.parent}"
        raise _taken(out, "cannot be written", why, "create it, or give another path", ENOENT)
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        why = "it is there and is no directory"
        raise _taken(out, "cannot be written", why, "give another path", ENOTDIR)
    if not should_merge and os.path.ismount(out):
        why = "it is a mount point, which a finished directory cannot be renamed to"
        raise _taken(out, "cannot be taken", why, "give a directory in it", EBUSY)
    if not should_merge and any(out.iterdir()):
        remedy = "give a directory that is not there yet, or empty it"
        raise _taken(out, "is not empty", "nothing is overwritten unasked", remedy, ENOTEMPTY)


def _taken(out: Path, what: str, why: str, remedy: str, number: int) -> StorageError:
    return StorageError(f"{out} {what}", why=why, remedy=remedy, path=str(out), errno=number)


def _refuse_full(directory: Path, tensors: Iterable[FileTensor]) -> None:
    needed = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
    needed += _BESIDE_BYTES
    free_bytes = shutil.disk_usage(directory).free  # to an ordinary user
    if needed > free_bytes:
        raise OutOfSpace(
            f"the export needs {format_bytes(needed)}, {format_bytes(free_bytes)} are free",
            why="a half-written model is of no use, so none is begun",
            remedy="free space there, give another path, or export in a narrower type",
            path=str(directory),
            asked_bytes=needed,
            got_bytes=free_bytes,
        )


def _write_index(path: Path, layout: ExportLayout, writers: list[ShardWriter]) -> None:
    places = [place for writer in writers for place in writer.places]
    known = layout.skeleton
    index = {
        "metadata": {
            "total_parameters": sum(parameter.numel() for parameter in known.parameters()),
            "total_size": sum(place.nbytes for place in places),
        },
        "weight_map": {place.name: place.path.name for place in places},
    }
    with storage_errors("an index cannot be written", path):
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_files_list(partial: Path, names: tuple[str, ...]) -> None:
    """Hashes of all files, which `lohan check` compares; read by whoever may read the model."""
    path = partial / MODEL_LIST_NAME
    with storage_errors("an export cannot be made durable", path):
        write_list(path, hash_files(partial, names))
        shutil.copymode(partial / names[0], path)


def place_model(partial: Path, out: Path, *, is_merge: bool) -> None:
    """Make a written directory durable, then give it its name, or merge its files into `out`."""
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    if is_merge:
        _merge(partial, out)
        return
    with storage_errors("an export cannot be renamed", out):
        os.rename(partial, out)  # an empty directory is replaced, any other is not
    _sync(out.parent)


def _sync(path: Path) -> None:
    with storage_errors("an export cannot be made durable", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _merge(partial: Path, out: Path) -> None:
    """Replace the model files in `out`; without a configuration it is no model for anyone."""
    with storage_errors("an export cannot be moved", out):
        for name in _CONFIGURATIONS:
            (out / name).unlink(missing_ok=True)
        weights = (*out.glob("model*.safetensors"), *out.glob("adapter_model*.safetensors"))
        for old in (out / INDEX_NAME, out / MODEL_LIST_NAME, *weights):
            old.unlink(missing_ok=True)
        entries = sorted(partial.iterdir(), key=lambda path: path.name in _CONFIGURATIONS)
        for path in entries:
            if path.is_dir():
                shutil.rmtree(out / path.name, ignore_errors=True)
            os.rename(path, out / path.name)
    _sync(out)


def export_layout(source: ModelSource, dtype: torch.dtype) -> ExportLayout:
    """Lay out an export of a model under the names its source uses.

    Raises:
        ConfigError: a tensor has no elements, or the usual layout cannot be made.
    """
    skeleton = source.skeleton
    match, groups = source.match, source.groups
    if match is None:
        match, groups = _usual_layout(skeleton, source.aliases)
    kept: list[NameGroup] = []
    tensors: list[FileTensor] = []
    known = skeleton.state_dict()
    for group in groups:
        owned = {name: torch.empty_like(known[name], device="meta") for name in group.owned}
        for one, shapes in _written(skeleton, group, match, owned):
            kept.append(one)
            for name, shape in shapes.items():
                if math.prod(shape) == 0:
                    raise ConfigError(
                        f"the tensor {name} has the shape {list(shape)}",
                        why="a model with a tensor without elements is broken",
                        remedy="check the configuration of the model",
                    )
                tensors.append((name, _dtype(source, one, name, dtype), shape))
    return ExportLayout(
        skeleton=skeleton,
        match=match,
        aliases=source.aliases,
        groups=tuple(kept),
        tensors=tuple(tensors),
    )


def _dtype(source: ModelSource, group: NameGroup, name: str, dtype: torch.dtype) -> torch.dtype:
    """Parameters are written in the type asked for, buffers as they were stored."""
    if any(owned in source.aliases for owned in group.owned):
        return dtype
    if name in source.stored:
        return source.stored[name].dtype
    return source.skeleton.get_buffer(group.owned[0]).dtype


def _usual_layout(
    skeleton: nn.Module, aliases: Mapping[str, str]
) -> tuple[NameMatch, tuple[NameGroup, ...]]:
    ties: Mapping[str, str] = getattr(skeleton, "all_tied_weights_keys", None) or {}
    known = skeleton.state_dict()
    owned: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(aliases.values()):
        # Of tied names the one the others are tied to is saved.
        kept = ties.get(name, name)
        owned[kept] = torch.empty_like(known[kept], device="meta")
    for name, buffer in persistent_buffers(skeleton).items():
        owned[name] = torch.empty_like(buffer, device="meta")
    stored = default_names(skeleton, owned)
    match = match_names(skeleton, stored)
    return match, match.groups


def _written(
    skeleton: nn.Module,
    group: NameGroup,
    match: NameMatch,
    owned: Mapping[str, torch.Tensor],
) -> Iterator[tuple[NameGroup, dict[str, tuple[int, ...]]]]:
    """The group with the shapes of its stored tensors; one by one if it cannot be converted back.

    A tensor under the model's own name is loaded as it is, so nothing is lost by that.
    """
    try:
        stored = to_stored(skeleton, group, match, owned)
    except ConfigError:
        for name, tensor in owned.items():
            yield NameGroup(stored=(name,), owned=(name,)), {name: tuple(tensor.shape)}
        return
    yield (
        dataclasses.replace(group, stored=tuple(stored)),
        {name: tuple(tensor.shape) for name, tensor in stored.items()},
    )


def cut_shards(
    tensors: Sequence[FileTensor], max_shard_bytes: int
) -> dict[str, tuple[FileTensor, ...]]:
    """Files and the tensors in them; a tensor larger than a shard has one for itself.

    Raises:
        ConfigError: the largest size is not above zero.
    """
    if max_shard_bytes <= 0:
        raise ConfigError(
            f"a shard of {max_shard_bytes} bytes holds nothing",
            why="every file holds at least one tensor",
            remedy="give a size such as 5GB",
        )
    shards: list[list[FileTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        nbytes = math.prod(tensor[2]) * tensor[1].itemsize
        if shards[-1] and filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += nbytes
    if len(shards) == 1:
        return {SINGLE_NAME: tuple(shards[0])}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": tuple(shard)
        for number, shard in enumerate(shards, start=1)
    }
