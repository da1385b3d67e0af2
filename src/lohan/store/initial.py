"""The first values of a store: tensors in any order become masters, compute weights and zeros.

Owns checking names, shapes and types, the exact conversion, and writing tensors that share pages
with their neighbours. Called through `StateStore.fill`; nothing is sealed here.

Note "shared pages". Tensors do not begin at pages, so a page may hold the end of one and the start
of the next, which come at different times. Such a page is read, changed and written on its own;
the pages in between are written as they are. The page's checksum is then that of its last write,
and no other checksum is lost.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from lohan import _native
from lohan.errors import ConfigError
from lohan.ssd import ALIGNMENT_BYTES, Buffer, StripedTicket, whole_pages
from lohan.store.files.state_file import Home, StateFile
from lohan.store.format.layout import (
    GRAIN,
    ByteRange,
    ComputeFormat,
    MasterFormat,
    Part,
    StateLayout,
    TensorEntry,
    TensorPlace,
)
from lohan.store.format.residents import Residents
from lohan.vocabulary import BlockId

_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_MOST_NAMED = 5

Moments = Callable[[str], tuple[torch.Tensor, torch.Tensor]]
"""First and second moment of a trainable tensor, by its name, in fp32."""


def fill_states(
    file: StateFile,
    residents: Residents,
    tensors: Iterable[tuple[str, torch.Tensor]],
    scratch: Buffer,
    moments: Moments | None = None,
) -> None:
    """Write every tensor of the layout to slot 0, or to RAM where it is resident.

    Moments are zero where none are given: a run begins.

    May block: yes. Owns until: it ends, the scratch memory.

    Raises:
        ConfigError: a name is unknown, twice or missing, or a shape or type is wrong.
        StorageError: a drive failed.
    """
    layout = file.layout
    missing = dict.fromkeys(layout.names)
    writer = _Writer(file, residents, scratch)
    try:
        for name, tensor in tensors:
            block, place = layout.find(name)
            if name not in missing:
                raise ConfigError(
                    f"the tensor {name} came twice",
                    why="it is not known which of the two is meant",
                    remedy="give every tensor once",
                )
            _refuse_unfit(place.entry, tensor)
            given = None
            if moments is not None and place.entry.is_trainable:
                given = _checked_moments(place.entry, moments(name))
            writer.write(block, place, tensor.detach().contiguous().view(-1), given)
            del missing[name]
        writer.wait()
    finally:
        writer.settle()
    if missing:
        raise _missing_names(layout, list(missing))


def verify_fill(file: StateFile, residents: Residents, scratch: Buffer) -> None:
    """Read back what a fill wrote to SSD and compare it. May block: yes.

    Raises:
        Corrupt: a drive changed bytes; block, part, file and offset are named.
    """
    for home in file.extents:
        block, slot, part = home
        if slot == 0 and residents.find(block, part) is None:
            file.verify(home, address=scratch.address, nbytes=scratch.nbytes)


def _refuse_unfit(entry: TensorEntry, tensor: torch.Tensor) -> None:
    if tuple(tensor.shape) != entry.shape:
        raise ConfigError(
            f"the tensor {entry.name} has shape {tuple(tensor.shape)}, {entry.shape} is expected",
            why="the weights are those of another model",
            remedy="give the weights of the model the store was made for",
        )
    if tensor.dtype not in _FORMATS or tensor.device.type != "cpu":
        raise ConfigError(
            f"the tensor {entry.name} is {tensor.dtype} on {tensor.device}",
            why="fp32, bf16 and fp16 tensors in main memory are taken",
            remedy="convert it, or copy it to the cpu, before it is given",
        )


def _checked_moments(
    entry: TensorEntry, found: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    for moment in found:
        _refuse_unfit(entry, moment)
        if moment.dtype is not torch.float32:
            raise ConfigError(
                f"a moment of {entry.name} is {moment.dtype}",
                why="moments are fp32",
                remedy="give the moments as they were read from a store",
            )
    mean, square = (moment.detach().contiguous().view(-1) for moment in found)
    # The sign bit of the second moment is not its own: it carries a bit of the master.
    if torch.signbit(square).any():
        raise ConfigError(
            f"the second moment of {entry.name} has negative values",
            why="it is a mean of squares",
            remedy="check where the moments come from; they may be damaged or exchanged",
        )
    return mean, square


def _missing_names(layout: StateLayout, missing: list[str]) -> ConfigError:
    shown = ", ".join(missing[:_MOST_NAMED]) + (", ..." if len(missing) > _MOST_NAMED else "")
    return ConfigError(
        f"{len(missing)} of {len(layout.names)} tensors did not come: {shown}",
        why="every parameter needs a first value",
        remedy="give the weights of the whole model",
    )


@dataclass(slots=True)
class _Side:
    """One half of the scratch memory: values of a piece, and the writes that use it."""

    address: int
    writes: list[StripedTicket]


class _Writer:
    """Writes tensors piece by piece; while one half of the scratch is written, the other fills."""

    def __init__(self, file: StateFile, residents: Residents, scratch: Buffer) -> None:
        self._file = file
        self._residents = residents
        self._format = file.layout.compute_format
        self._masters = file.layout.master_format
        self._shared_pages: set[tuple[Home, int]] = set()
        half_bytes = scratch.nbytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._sides = [_Side(scratch.address + n * half_bytes, []) for n in range(2)]
        # Five areas (fp32 input and four parts), each with room for a shared page at either end.
        self._area_bytes = half_bytes // 5 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._piece_positions = (self._area_bytes - 2 * ALIGNMENT_BYTES) // 4 // GRAIN * GRAIN
        assert self._piece_positions > 0

    def write(
        self,
        block: BlockId,
        place: TensorPlace,
        flat: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Write one tensor's parts; its memory is free when this ends."""
        begin = place.begin
        while begin < place.end:
            # Cut at multiples of the piece, so that pieces of one tensor share no pages.
            end = min(place.end, (begin // self._piece_positions + 1) * self._piece_positions)
            inside = slice(begin - place.begin, end - place.begin)
            pieces = None if moments is None else (moments[0][inside], moments[1][inside])
            self._write_piece(block, place, flat[inside], pieces, begin, end)
            begin = end

    def wait(self) -> None:
        """Wait for all writes.

        Raises:
            StorageError: one failed.
        """
        for side in self._sides:
            self._wait_side(side)

    def settle(self) -> None:
        """Wait for all writes, whatever becomes of them."""
        for side in self._sides:
            for ticket in side.writes:
                ticket.settle()
            side.writes.clear()

    def _wait_side(self, side: _Side) -> None:
        while side.writes:
            side.writes[0].wait()
            del side.writes[0]

    def _write_piece(
        self,
        block: BlockId,
        place: TensorPlace,
        source: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor] | None,
        begin: int,
        end: int,
    ) -> None:
        side = self._sides[0]
        self._sides.reverse()
        self._wait_side(side)
        entry = place.entry
        parts = self._file.layout.block(block).trainable_parts
        parts = parts if entry.is_trainable else (Part.FROZEN16,)
        spans = {
            part: self._take_span((block, 0, part), side, n + 1, begin, end)
            for n, part in enumerate(parts)
        }
        addresses = {part: span.address for part, span in spans.items()}
        self._convert(entry, source, moments, side.address, addresses)
        for span in spans.values():
            self._write_span(span, side)

    def _take_span(self, home: Home, side: _Side, area: int, begin: int, end: int) -> "_Span":
        """Choose where the values of a part are made: in place if resident, else in scratch."""
        width = home[2].bytes_per_parameter
        first, last = begin * width, end * width
        resident = self._residents.find(home[0], home[2])
        if resident is not None:
            return _Span(home, resident.address + first, first, last, None)
        page = first // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        start = side.address + area * self._area_bytes
        span = _Span(home, start + first - page, first, last, start)
        for offset_bytes in span.shared_pages():
            # The neighbour's write may still be on its way.
            self.wait()
            where = ByteRange(offset_bytes=offset_bytes, nbytes=ALIGNMENT_BYTES)
            address = start + offset_bytes - page
            if (home, offset_bytes) not in self._shared_pages:
                # No neighbour has come yet; what an earlier fill left there does not count.
                self._shared_pages.add((home, offset_bytes))
                ctypes.memset(address, 0, ALIGNMENT_BYTES)
                continue
            self._file.start_read(home, where, address=address, should_verify=True).wait()
        return span

    def _write_span(self, span: "_Span", side: _Side) -> None:
        if span.start is None:
            return
        for where in span.writes():
            address = span.start + where.offset_bytes - span.first_page
            side.writes.append(self._file.start_write(span.home, where, address=address))

    def _convert(
        self,
        entry: TensorEntry,
        source: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor] | None,
        fp32: int,
        addresses: dict[Part, int],
    ) -> None:
        count = source.numel()
        found = _FORMATS[source.dtype]
        wanted = self._format.value
        if not entry.is_trainable and found == wanted:
            ctypes.memmove(addresses[Part.FROZEN16], source.data_ptr(), 2 * count)
            return
        p32 = source.data_ptr()
        if found != "fp32":
            _convert(p32, found, fp32, "fp32", count)
            p32 = fp32
        if not entry.is_trainable:
            _convert(p32, "fp32", addresses[Part.FROZEN16], wanted, count)
            self._refuse_overflow(entry, source, addresses[Part.FROZEN16])
            return
        for number, part in enumerate((Part.M32, Part.V32)):
            if moments is None:
                ctypes.memset(addresses[part], 0, 4 * count)
            else:
                ctypes.memmove(addresses[part], moments[number].data_ptr(), 4 * count)
        if self._masters is MasterFormat.SPLIT:
            _native.split_masters(
                p32=p32,
                p16=addresses[Part.P16],
                lo16=addresses[Part.LO16],
                v32=addresses[Part.V32],
                num_elements=count,
                num_threads=1,
            )
            return
        ctypes.memmove(addresses[Part.P32], p32, 4 * count)
        _convert(p32, "fp32", addresses[Part.P16], wanted, count)
        self._refuse_overflow(entry, source, addresses[Part.P16])

    def _refuse_overflow(self, entry: TensorEntry, source: torch.Tensor, address: int) -> None:
        if self._format is not ComputeFormat.FP16:
            return
        memory = (ctypes.c_char * (2 * source.numel())).from_address(address)
        rounded = torch.frombuffer(memory, dtype=torch.float16)
        is_lost = rounded.isinf() & source.isfinite()
        if is_lost.any():
            worst = source[is_lost].abs().max().item()
            raise ConfigError(
                f"the tensor {entry.name} has values up to {worst:.6g}",
                why="fp16 ends at 65504: they would be infinite in compute",
                remedy="compute in bf16",
            )


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes [first, last) of a part, and the scratch memory of their pages (None: in RAM)."""

    home: Home
    address: int
    first: int
    last: int
    start: int | None

    @property
    def first_page(self) -> int:
        return self.first // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    @property
    def end_page(self) -> int:
        return whole_pages(self.last)

    def shared_pages(self) -> list[int]:
        """Offsets of pages that hold bytes of others, or padding."""
        pages = []
        if self.first % ALIGNMENT_BYTES:
            pages.append(self.first_page)
        tail = self.end_page - ALIGNMENT_BYTES
        if self.last % ALIGNMENT_BYTES and tail not in pages:
            pages.append(tail)
        return pages

    def writes(self) -> list[ByteRange]:
        """Shared pages one by one, those in between as one."""
        shared = self.shared_pages()
        body_begin = self.first_page + (ALIGNMENT_BYTES if self.first_page in shared else 0)
        tail = self.end_page - ALIGNMENT_BYTES
        body_end = tail if tail in shared else self.end_page
        ranges = [ByteRange(offset_bytes=page, nbytes=ALIGNMENT_BYTES) for page in shared]
        if body_begin < body_end:
            ranges.append(ByteRange(offset_bytes=body_begin, nbytes=body_end - body_begin))
        return ranges


def _convert(source: int, source_format: str, target: int, target_format: str, count: int) -> None:
    _native.convert(
        source=source,
        source_format=source_format,
        target=target,
        target_format=target_format,
        num_elements=count,
        num_threads=1,
    )
