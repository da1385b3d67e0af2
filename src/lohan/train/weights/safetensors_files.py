"""Safetensors files, read with distrust and written from known shapes, a tensor at a time.

Owns the header (its text, the checks of it against the file, the names of number types) and the
reads and writes. The format: 8 bytes with the header's length (little-endian), the header as JSON
(per tensor its type, shape and byte range in what follows), then the tensors' bytes without gaps.
Files are read into memory of their own, never mapped: mapped pages count as the process's memory
for as long as they stay. The page cache is told that the bytes are not needed again. Called by
`source` (in) and `export_hf` (out).
"""

import contextlib
import errno
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lohan.errors import ConfigError, Corrupt, ShortTransfer
from lohan.ssd.engines.storage_errors import storage_errors
from lohan.units import MIB

LENGTH_BYTES = 8
PIECE_BYTES = 16 * MIB
"""Of what is read or converted at once where a whole tensor is not needed."""
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
    with storage_errors("a weights file cannot be read", path), open(path, "rb") as file:
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(LENGTH_BYTES)
        if len(start) < LENGTH_BYTES:
            raise _cut_off(path, "its first 8 bytes", LENGTH_BYTES, file_bytes)
        (header_bytes,) = struct.unpack("<Q", start)
        if header_bytes > _LARGEST_HEADER_BYTES:
            raise _not_a_header(path, f"it announces a header of {header_bytes} bytes")
        if LENGTH_BYTES + header_bytes > file_bytes:
            raise _cut_off(path, "its header", LENGTH_BYTES + header_bytes, file_bytes)
        text = file.read(header_bytes)
        if len(text) < header_bytes:
            raise _cut_off(path, "its header", header_bytes, len(text))
    return _tensors(path, text, LENGTH_BYTES + header_bytes, file_bytes)


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


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Read one tensor as it is stored. May block: yes.

    Raises:
        ShortTransfer: the file has become shorter than its header said.
        StorageError: it cannot be read.
    """
    # Bytes first: some number types cannot be made into a numpy array.
    memory = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
    with _reading(stored) as descriptor:
        _read_at(descriptor, stored, memory, 0)
    return memory.view(stored.dtype).view(stored.shape)


def read_pieces(stored: StoredTensor, piece_bytes: int = PIECE_BYTES) -> Iterator[torch.Tensor]:
    """The elements of a tensor in order, flat, a piece at a time; a piece is valid until the next.

    Raises:
        ShortTransfer, StorageError: as `read_tensor`.
    """
    memory = torch.empty(min(piece_bytes, stored.nbytes), dtype=torch.uint8, device="cpu")
    with _reading(stored) as descriptor:
        for at in range(0, stored.nbytes, piece_bytes):
            piece = memory[: min(piece_bytes, stored.nbytes - at)]
            _read_at(descriptor, stored, piece, at)
            yield piece.view(stored.dtype)


def is_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two stored tensors have the same type, shape and values. Reads pieces of both."""
    if first.dtype is not second.dtype or first.shape != second.shape:
        return False
    pairs = zip(read_pieces(first), read_pieces(second), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@contextlib.contextmanager
def _reading(stored: StoredTensor) -> Iterator[int]:
    with storage_errors("a weights file cannot be opened", stored.path):
        descriptor = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
        with contextlib.suppress(OSError):
            # A model is read once and is larger than what else is in the page cache.
            os.posix_fadvise(descriptor, stored.offset_bytes, stored.nbytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read_at(descriptor: int, stored: StoredTensor, memory: torch.Tensor, at: int) -> None:
    view = memory.numpy().data
    done = 0
    while done < len(view):
        offset = stored.offset_bytes + at + done
        what = f"the tensor {stored.name} cannot be read"
        with storage_errors(what, stored.path, offset_bytes=offset):
            got = os.preadv(descriptor, [view[done:]], offset)
        if got == 0:
            raise ShortTransfer(
                f"a weights file ends within the tensor {stored.name}",
                why="it has become shorter since it was checked",
                remedy="leave the files of a model alone while it is read; copy them again",
                path=str(stored.path),
                offset_bytes=offset,
                asked_bytes=len(view) - done,
                got_bytes=0,
            )
        done += got


class ShardWriter:
    """One file in the making: its space is reserved, then tensors come in any order.

    Runs on: one thread. `write` and `finish` may block.
    """

    def __init__(
        self, path: Path, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
    ) -> None:
        """Make the file, write its header and reserve the space of all tensors.

        Raises:
            OutOfSpace, StorageError: the file cannot be made or has no room; it is removed again.
        """
        self.path = path
        header, self.places = plan_file(path, tensors)
        self.nbytes = len(header) + sum(place.nbytes for place in self.places)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with storage_errors("a weights file cannot be made", self.path):
            self._descriptor = os.open(path, flags, 0o666)
        try:
            with storage_errors("a weights file has no room", self.path):
                try:
                    os.posix_fallocate(self._descriptor, 0, self.nbytes)
                except OSError as error:
                    # Some filesystems cannot reserve; then only the size is set.
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
                    os.truncate(self._descriptor, self.nbytes)
                self._write_at(memoryview(header), 0)
        except BaseException:
            self.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    def write(self, place: StoredTensor, tensor: torch.Tensor) -> None:
        """Write one tensor's values in the type of its place, a piece at a time. May block: yes.

        Rounding is to nearest, ties to even, as compute weights are rounded.

        Raises:
            ConfigError: a finite value is too large for the type.
            OutOfSpace, StorageError: the write failed.
        """
        flat = tensor.detach().contiguous().view(-1)
        num_elements = max(1, PIECE_BYTES // flat.element_size())
        offset = place.offset_bytes
        for begin in range(0, flat.numel(), num_elements):
            source = flat[begin : begin + num_elements]
            piece = source.to(device="cpu", dtype=place.dtype)
            if place.dtype is torch.float16 and source.dtype is not torch.float16:
                _refuse_overflow(place.name, source, piece)
            view = piece.view(torch.uint8).numpy().data
            with storage_errors(f"the tensor {place.name} cannot be written", self.path):
                self._write_at(view, offset)
            offset += len(view)

    def finish(self) -> None:
        """Make the file durable and close it. May block: yes.

        Raises:
            StorageError: the drive did not take it.
        """
        with storage_errors("a weights file cannot be made durable", self.path):
            os.fsync(self._descriptor)
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()

    def close(self) -> None:
        """Close the file, whatever is in it. Twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_at(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            put = os.pwrite(self._descriptor, view[done:], offset + done)
            if put == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += put


def _refuse_overflow(name: str, source: torch.Tensor, piece: torch.Tensor) -> None:
    source = source.cpu()
    is_lost = piece.isinf() & source.isfinite()
    if is_lost.any():
        raise ConfigError(
            f"the tensor {name} has values up to {source[is_lost].abs().max().item():.6g}",
            why="fp16 ends at 65504: they would be infinite in the file",
            remedy="export in bf16 or fp32",
        )
