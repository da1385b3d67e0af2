"""A trained model out of a stream of tensors, in Hugging Face's layout, whole or not at all.

Owns the order of an export: checks of place and space, all space reserved, tensors written as they
come, files made durable, the result checked, then renamed into place. What is written where is
`export_layout`'s, the files beside the weights are `carried_files`'. Called by trainers and by
`lohan export`.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lohan.engine.model_buffers import persistent_buffers
from lohan.errors import CheckpointError, ConfigError, OutOfSpace, StorageError
from lohan.ssd.engines.storage_errors import storage_error
from lohan.ssd.runs.partial_directory import partial_directory
from lohan.train.weights import meta_model
from lohan.train.weights.carried_files import write_carried_files
from lohan.train.weights.check_export import ModelDirectoryReport, check_model_directory
from lohan.train.weights.checkpoint_files import INDEX_NAME, SINGLE_NAME, shown
from lohan.train.weights.checkpoint_names import NameGroup
from lohan.train.weights.export_layout import ExportLayout, FileTensor, cut_shards, export_layout
from lohan.train.weights.file_list import MODEL_LIST_NAME, files_below, hash_files, write_list
from lohan.train.weights.safetensors_format import StoredTensor
from lohan.train.weights.safetensors_stream import ShardWriter
from lohan.train.weights.source import ModelSource, source_of_config
from lohan.units import GB, MB, format_bytes

MAX_SHARD_BYTES = 5 * GB
EXPORT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LIBRARY = "transformers."
_CONFIGURATIONS = ("config.json", "adapter_config.json")
_BESIDE_BYTES = 64 * MB
"""Left free for configuration, tokenizer and the filesystem's own records."""


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
    return ModelDirectoryReport(
        path=out,
        architecture=type(model).__name__,
        num_files=1,
        num_tensors=len(own),
        num_parameters=sum(math.prod(shape) for _, _, shape in own),
        total_bytes=writer.nbytes,
        dtypes=Counter(str(kind) for _, kind, _ in own),
        unexpected=(),
        problems=(),
        remarks=(),
        files=written,
    )


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
        yield from meta_model.persistent_buffers(source.make_model()).items()


def refuse_taken(out: Path, *, should_merge: bool = False) -> None:
    """Refuse an output that cannot be taken, before time is spent on it.

    Raises:
        StorageError: naming the path and what to do.
    """
    if not out.parent.is_dir():
        raise StorageError(
            f"{out} cannot be written",
            why=f"there is no directory {out.parent}",
            remedy="create it, or give another path",
            path=str(out),
            errno=errno.ENOENT,
        )
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise StorageError(
            f"{out} cannot be written",
            why="it is there and is no directory",
            remedy="give another path",
            path=str(out),
            errno=errno.ENOTDIR,
        )
    if not should_merge and os.path.ismount(out):
        raise StorageError(
            f"{out} cannot be taken",
            why="it is a mount point, which a finished directory cannot be renamed to",
            remedy="give a directory in it",
            path=str(out),
            errno=errno.EBUSY,
        )
    if not should_merge and any(out.iterdir()):
        raise StorageError(
            f"{out} is not empty",
            why="nothing is overwritten unasked",
            remedy="give a directory that is not there yet, or empty it",
            path=str(out),
            errno=errno.ENOTEMPTY,
        )


def free_bytes_at(directory: Path) -> int:
    """Bytes an ordinary user can still write there."""
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def _refuse_full(directory: Path, tensors: Iterable[FileTensor]) -> None:
    needed = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
    needed += _BESIDE_BYTES
    free_bytes = free_bytes_at(directory)
    if needed > free_bytes:
        raise OutOfSpace(
            f"the export needs {format_bytes(needed)}, {format_bytes(free_bytes)} are free",
            why="a half-written model is of no use, so none is begun",
            remedy="free space there, give another path, or export in a narrower type",
            path=str(directory),
            asked_bytes=needed,
            got_bytes=free_bytes,
        )


@contextlib.contextmanager
def _told(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(what, error.errno or errno.EIO, path=str(path)) from None


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
    with _told("an index cannot be written", path):
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_files_list(partial: Path, names: tuple[str, ...]) -> None:
    """Hashes of all files, which `lohan check` compares; read by whoever may read the model."""
    path = partial / MODEL_LIST_NAME
    with _told("an export cannot be made durable", path):
        write_list(path, hash_files(partial, names))
        shutil.copymode(partial / names[0], path)


def place_model(partial: Path, out: Path, *, is_merge: bool) -> None:
    """Make a written directory durable, then give it its name, or merge its files into `out`."""
    _sync_all(partial)
    if is_merge:
        _merge(partial, out)
    else:
        _rename(partial, out)


def _sync_all(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def _sync(path: Path) -> None:
    with _told("an export cannot be made durable", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _rename(partial: Path, out: Path) -> None:
    with _told("an export cannot be renamed", out):
        os.rename(partial, out)  # an empty directory is replaced, any other is not
    _sync(out.parent)


def _merge(partial: Path, out: Path) -> None:
    """Replace the model files in `out`; without a configuration it is no model for anyone."""
    with _told("an export cannot be moved", out):
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
