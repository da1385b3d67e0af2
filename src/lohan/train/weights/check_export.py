"""Is this directory a whole model? Asked after an export, and by `lohan check`.

Owns the questions and the report. Everything `open_source` refuses is a problem here, and values
are looked at too. Changes nothing.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lohan.errors import LohanError
from lohan.train.weights.checkpoint_files import INDEX_NAME, shown
from lohan.train.weights.safetensors_files import StoredTensor, read_pieces
from lohan.train.weights.source import ModelSource, open_source

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_TOKENIZER_SIGNS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectoryReport:
    """What was found in a model directory."""

    path: Path
    architecture: str
    """Its class, or nothing if that could not be told."""
    num_files: int
    num_tensors: int
    num_parameters: int
    """Elements of all stored tensors."""
    total_bytes: int
    dtypes: Mapping[str, int]
    """How many tensors are stored in each number type."""
    unexpected: tuple[str, ...]
    """Stored names the model has no use for."""
    problems: tuple[str, ...]
    """Why it is not a whole model; empty if it is one."""
    remarks: tuple[str, ...]
    """What is worth knowing and no problem."""
    files: tuple[str, ...] = field(default=(), compare=False)
    """Of an export: names of all files it wrote."""

    @classmethod
    def of(
        cls,
        path: Path,
        architecture: str,
        stored: Sequence[StoredTensor],
        problems: Sequence[str] = (),
        remarks: Sequence[str] = (),
        unexpected: tuple[str, ...] = (),
    ) -> "ModelDirectoryReport":
        """With what can be counted of the stored tensors."""
        kinds = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in stored)
        return cls(
            path=path,
            architecture=architecture,
            num_files=len({tensor.path for tensor in stored}),
            num_tensors=len(stored),
            num_parameters=sum(math.prod(tensor.shape) for tensor in stored),
            total_bytes=sum(tensor.nbytes for tensor in stored),
            dtypes=dict(kinds.most_common()),
            unexpected=unexpected,
            problems=tuple(problems),
            remarks=tuple(remarks),
        )


def check_model_directory(
    directory: Path,
    *,
    should_read_values: bool = True,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> ModelDirectoryReport:
    """Check that index, files, headers, configuration and values fit. Never raises for damage.

    Args:
        should_read_values: also read every tensor and look for NaN and infinity.
    """
    problems: list[str] = []
    try:
        source = open_source(directory, trust_remote_code=trust_remote_code, should_warn=False)
    except LohanError as error:
        return ModelDirectoryReport.of(directory, "", (), [f"{error.what}: {error.why}"])
    remarks = list(source.remarks)
    stored = list(source.stored.values())
    for tensor in stored:
        if math.prod(tensor.shape) == 0:
            problems.append(f"{tensor.path.name}: {tensor.name} has the shape {list(tensor.shape)}")
    remarks += _index_remarks(directory, stored)
    remarks += _dtype_remarks(source)
    if source.gguf_file is not None:
        remarks.append(f"{source.gguf_file} is a GGUF file: its values are not looked at")
    elif not any((directory / name).is_file() for name in _TOKENIZER_SIGNS):
        remarks.append("there is no tokenizer beside the weights")
    if should_read_values:
        try:
            look_at_values(stored, problems, remarks, progress)
        except LohanError as error:
            problems.append(f"{error.what}: {error.why}")
    name = source.kind.__name__
    return ModelDirectoryReport.of(directory, name, stored, problems, remarks, source.unexpected)


def _index_remarks(directory: Path, stored: list[StoredTensor]) -> list[str]:
    index = directory / INDEX_NAME
    remarks = []
    if index.is_file():
        fields = json.loads(index.read_text(encoding="utf-8"))
        said = (fields.get("metadata") or {}).get("total_size")
        found = sum(tensor.nbytes for tensor in stored)
        if said is not None and said != found:
            remarks.append(f"the index says {said} bytes in all, the files hold {found}")
    used = {tensor.path.name for tensor in stored}
    strays = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in used)
    if strays and used:
        remarks.append(f"files that are not part of the model: {shown(strays)}")
    return remarks


def _dtype_remarks(source: ModelSource) -> list[str]:
    said = getattr(source.config, "dtype", None)
    name = str(said).removeprefix("torch.")
    found = {
        str(tensor.dtype).removeprefix("torch.")
        for tensor in source.stored.values()
        if tensor.dtype.is_floating_point
    }
    if said is None or not found or name in found:
        return []
    return [f"config.json says {name}, the weights are {shown(sorted(found))}"]


def look_at_values(
    stored: list[StoredTensor],
    problems: list[str],
    remarks: list[str],
    progress: Progress | None,
) -> None:
    """Read every tensor and say where numbers are missing. Raises StorageError."""
    total_bytes, done_bytes = sum(tensor.nbytes for tensor in stored), 0
    for tensor in stored:
        num_nan = num_infinite = 0
        for piece in read_pieces(tensor):
            done_bytes += piece.numel() * piece.element_size()
            if progress is not None:
                progress(done_bytes, total_bytes)
            if tensor.dtype.is_floating_point:
                num_nan += int(piece.isnan().sum())
                num_infinite += int(piece.float().isinf().sum())
        count = math.prod(tensor.shape)
        where = f"{tensor.path.name}: {tensor.name}"
        if count and num_nan == count:
            problems.append(f"{where} is NaN in all of its {count} elements")
        elif num_nan or num_infinite:
            remarks.append(f"{where} has {num_nan} NaN and {num_infinite} infinite elements")
