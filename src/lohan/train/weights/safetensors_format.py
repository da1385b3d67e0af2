"""The safetensors file format: its header, read with distrust and written from known shapes.

Owns the header's text, the checks of it against the file, and the names of its number types. The
format: 8 bytes with the header's length (little-endian), the header as JSON (per tensor its type,
shape and byte range in what follows), then the tensors' bytes without gaps. Moves no tensor bytes;
`safetensors_stream` does.
"""

import errno
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lohan.errors import Corrupt, ShortTransfer
from lohan.ssd.engines.storage_errors import storage_error

LENGTH_BYTES = 8
_LARGEST_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_METADATA = "__metadata__"

_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor in a file: what it is and where its bytes lie."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset_bytes: int
    """From the start of the file."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of a file in the order of their bytes, after checking that all of them are there.

    Raises:
        ShortTransfer: the file is shorter than its header says; the first tensor cut off is named.
        Corrupt: the header is not one.
        StorageError: the file cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(LENGTH_BYTES)
            if len(start) < LENGTH_BYTES:
                raise _cut_off(path, "its first 8 bytes", LENGTH_BYTES, file_bytes)
            (header_bytes,) = struct.unpack("<Q", start)
            if header_bytes > _LARGEST_HEADER_BYTES:
                raise _not_a_header(path, f"it announces a header of {header_bytes} bytes")
            if LENGTH_BYTES + header_bytes > file_bytes:
                raise _cut_off(path, "its header", LENGTH_BYTES + header_bytes, file_bytes)
            text = bytearray()
            while len(text) < header_bytes:
                piece = file.read(header_bytes - len(text))
                if not piece:
                    raise _cut_off(path, "its header", header_bytes, len(text))
                text += piece
    except OSError as error:
        number = error.errno or errno.EIO
        raise storage_error("a weights file cannot be read", number, path=str(path)) from None
    return _tensors(path, bytes(text), LENGTH_BYTES + header_bytes, file_bytes)


def _tensors(path: Path, text: bytes, begin: int, file_bytes: int) -> tuple[StoredTensor, ...]:
    try:
        fields = json.loads(text.decode())
        if not isinstance(fields, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise _not_a_header(path, str(error)) from None
    found = [
        _tensor(path, name, entry, begin) for name, entry in fields.items() if name != _METADATA
    ]
    found.sort(key=lambda one: (one[0].offset_bytes, one[1]))
    at = begin
    for tensor, end in found:
        if tensor.offset_bytes != at:
            raise _not_a_header(path, f"tensor {tensor.name}: its bytes do not begin at {at}")
        if end - tensor.offset_bytes != tensor.nbytes:
            raise _not_a_header(
                path,
                f"tensor {tensor.name}: {end - tensor.offset_bytes} bytes are not its shape "
                f"{list(tensor.shape)} in {tensor.dtype}",
            )
        if end > file_bytes:
            raise _cut_off(path, f"the tensor {tensor.name}", end, file_bytes)
        at = end
    if at != file_bytes:
        raise _not_a_header(path, f"{file_bytes - at} bytes behind the last tensor belong to none")
    return tuple(tensor for tensor, _ in found)


def _tensor(path: Path, name: str, entry: object, begin: int) -> tuple[StoredTensor, int]:
    try:
        assert isinstance(entry, dict)
        first, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        numbers = (first, end, *shape)
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("a number is negative or not whole")
        kind = entry["dtype"]
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise _not_a_header(path, f"tensor {name}: {error or 'no entry'}") from None
    if kind not in _DTYPES:
        raise _not_a_header(path, f"tensor {name}: the number type {kind!r} is not known")
    tensor = StoredTensor(
        name=name, dtype=_DTYPES[kind], shape=shape, path=path, offset_bytes=begin + first
    )
    return tensor, begin + end


def plan_file(
    path: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
) -> tuple[bytes, tuple[StoredTensor, ...]]:
    """The first bytes of a file that will hold these tensors, and where each of them goes.

    Wider number types come first, so that every tensor is aligned to its type.
    """
    ordered = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    fields: dict[str, object] = {_METADATA: {"format": "pt"}}
    at = 0
    for name, dtype, shape in ordered:
        nbytes = math.prod(shape) * dtype.itemsize
        fields[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = LENGTH_BYTES + len(text)
    places = []
    for name, dtype, shape in ordered:
        place = StoredTensor(name=name, dtype=dtype, shape=shape, path=path, offset_bytes=begin)
        places.append(place)
        begin += place.nbytes
    return struct.pack("<Q", len(text)) + text, tuple(places)


def _cut_off(path: Path, what: str, asked_bytes: int, got_bytes: int) -> ShortTransfer:
    return ShortTransfer(
        f"a weights file ends within {what}",
        why="the file was cut off while it was downloaded, copied or written",
        remedy="download or copy that file again",
        path=str(path),
        asked_bytes=asked_bytes,
        got_bytes=got_bytes,
    )


def _not_a_header(path: Path, why: str) -> Corrupt:
    return Corrupt(
        "a weights file has a damaged header",
        why=why,
        remedy="download or copy that file again; it must be a safetensors file",
        path=str(path),
    )
