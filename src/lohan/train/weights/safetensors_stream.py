"""Tensor bytes from and to safetensors files, one tensor or one piece of it at a time.

Owns the reads and writes. Files are read into memory of their own, never mapped: mapped pages count
as the process's memory for as long as they stay. The page cache is told that the bytes are not
needed again. Called by `source` (in) and `export_hf` (out).
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lohan.errors import ConfigError, ShortTransfer
from lohan.ssd.engines.storage_errors import storage_error
from lohan.train.weights.safetensors_format import StoredTensor, plan_file
from lohan.units import MIB

PIECE_BYTES = 16 * MIB
"""Of what is read or converted at once where a whole tensor is not needed."""


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
    path = str(stored.path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        number = error.errno or errno.EIO
        raise storage_error("a weights file cannot be opened", number, path=path) from None
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
        try:
            got = os.preadv(descriptor, [view[done:]], offset)
        except OSError as error:
            raise storage_error(
                f"the tensor {stored.name} cannot be read",
                error.errno or errno.EIO,
                path=str(stored.path),
                offset_bytes=offset,
            ) from None
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
        with self._explained("a weights file cannot be made"):
            self._descriptor = os.open(path, flags, 0o666)
        try:
            with self._explained("a weights file has no room"):
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
            with self._explained(f"the tensor {place.name} cannot be written"):
                self._write_at(view, offset)
            offset += len(view)

    def finish(self) -> None:
        """Make the file durable and close it. May block: yes.

        Raises:
            StorageError: the drive did not take it.
        """
        with self._explained("a weights file cannot be made durable"):
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

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(what, error.errno or errno.EIO, path=str(self.path)) from None


def _refuse_overflow(name: str, source: torch.Tensor, piece: torch.Tensor) -> None:
    source = source.cpu()
    is_lost = piece.isinf() & source.isfinite()
    if is_lost.any():
        raise ConfigError(
            f"the tensor {name} has values up to {source[is_lost].abs().max().item():.6g}",
            why="fp16 ends at 65504: they would be infinite in the file",
            remedy="export in bf16 or fp32",
        )
