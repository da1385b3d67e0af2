"""Where the weights a segment computes with lie: in the state store, and in one flat buffer.

Owns this arithmetic. A segment's flat buffer holds its own trainable weights, its frozen ones and
those it borrows from other segments, one piece after the other, each in whole pages, so that pieces
are read from SSD straight to their places. Pure; made once by the engine.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from lohan.drive import SegmentMap
from lohan.drive.weights.parameter_views import ParameterLayout, ParameterSlot
from lohan.optimizer import LEAF_ELEMENTS
from lohan.store import GRAIN, BlockLayout, ByteRange, Part, StateLayout, TensorEntry
from lohan.vocabulary import BlockId

DEVICE_ALIGNMENT_BYTES = 256
"""Start of what compute reads in memory of a device's own. Libraries of GPUs choose kernels by the
alignment of what they are given, up to this; torch's own allocations have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """Positions of one part of one block, and their place in a flat buffer."""

    owner: BlockId
    part: Part
    begin: int
    end: int
    in_part: ByteRange
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes in whole pages."""
        return self.in_part.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStretch:
    """Bytes [begin, end) of a piece that lie together on a device, and where."""

    piece: WeightPiece
    begin: int
    end: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWeights:
    """The same weights in memory of a device's own, each tensor at `DEVICE_ALIGNMENT_BYTES`."""

    stretches: tuple[WeightStretch, ...]
    num_bytes: int
    layouts: Mapping[BlockId, ParameterLayout]


@dataclass(frozen=True, kw_only=True)
class SegmentWeights:
    """The flat buffer of one segment."""

    pieces: tuple[WeightPiece, ...]
    num_bytes: int
    layouts: Mapping[BlockId, ParameterLayout]
    """Places of the parameters, by the segment that owns them."""

    @functools.cached_property
    def on_device(self) -> DeviceWeights:
        """Where they lie on a device. Most tensors are whole multiples of the alignment, so that a
        piece is one stretch; behind one that is not, another begins."""
        slots = [(owner, slot) for owner, layout in self.layouts.items() for slot in layout.slots]
        stretches: list[WeightStretch] = []
        moved: dict[BlockId, list[ParameterSlot]] = {owner: [] for owner in self.layouts}
        end_bytes = 0
        for piece in self.pieces:
            last = piece.offset_bytes + piece.nbytes
            inside = [one for one in slots if piece.offset_bytes <= one[1].offset_bytes < last]
            begin, at = 0, _aligned(end_bytes)
            for owner, slot in sorted(inside, key=lambda one: one[1].offset_bytes):
                in_piece = slot.offset_bytes - piece.offset_bytes
                if (at + in_piece - begin) % DEVICE_ALIGNMENT_BYTES:
                    stretches.append(
                        WeightStretch(piece=piece, begin=begin, end=in_piece, offset_bytes=at)
                    )
                    begin, at = in_piece, _aligned(at + in_piece - begin)
                moved[owner].append(replace(slot, offset_bytes=at + in_piece - begin))
            stretches.append(
                WeightStretch(piece=piece, begin=begin, end=piece.nbytes, offset_bytes=at)
            )
            end_bytes = at + piece.nbytes - begin
        layouts = {
            owner: ParameterLayout(slots=tuple(moved[owner]), num_bytes=end_bytes)
            for owner in self.layouts
        }
        return DeviceWeights(stretches=tuple(stretches), num_bytes=end_bytes, layouts=layouts)

    def piece(self, part: Part, owner: BlockId) -> WeightPiece | None:
        """The piece of one part."""
        found = [one for one in self.pieces if one.part is part and one.owner == owner]
        return found[0] if found else None


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DEVICE_ALIGNMENT_BYTES) * DEVICE_ALIGNMENT_BYTES


def state_entries(
    model: torch.nn.Module, segments: SegmentMap
) -> dict[str, tuple[TensorEntry, ...]]:
    """Tensors of every segment's own parameters, for `StateLayout.pack`."""
    named = dict(model.named_parameters())
    return {
        f"{segment.id} {segment.name}": tuple(
            TensorEntry(
                name=name, shape=tuple(named[name].shape), is_trainable=named[name].requires_grad
            )
            for name in segment.parameters
        )
        for segment in segments
    }


def map_weights(
    segments: SegmentMap, layout: StateLayout, dtype: torch.dtype
) -> dict[BlockId, SegmentWeights]:
    """The flat buffer of every segment."""
    return {
        segment.id: _weights_of(
            segment.id, segment.borrowed, layout, dtype, has_own=bool(segment.parameters)
        )
        for segment in segments
    }


def position_cuts(num_positions: int, count: int) -> list[int]:
    """Positions that cut a block into `count` pieces, at leaves of the gradient's norm and at pages
    of every part; pieces of a small block may be empty."""
    step = math.lcm(GRAIN, LEAF_ELEMENTS)
    cuts = [num_positions * number // count // step * step for number in range(count)]
    return [*cuts, num_positions]


def _weights_of(
    segment: BlockId,
    borrowed: tuple[tuple[str, BlockId], ...],
    layout: StateLayout,
    dtype: torch.dtype,
    *,
    has_own: bool,
) -> SegmentWeights:
    pieces: list[WeightPiece] = []
    layouts: dict[BlockId, ParameterLayout] = {}
    end_bytes = 0

    def add(owner: BlockId, part: Part, begin: int, end: int) -> WeightPiece:
        nonlocal end_bytes
        in_part = layout.block(owner).byte_range(part, begin, end)
        piece = WeightPiece(
            owner=owner,
            part=part,
            begin=begin,
            end=end,
            in_part=in_part,
            offset_bytes=end_bytes,
        )
        pieces.append(piece)
        end_bytes += piece.nbytes
        return piece

    if has_own:
        own = layout.block(segment)
        whole = {
            part: add(segment, part, 0, own.num_positions(part))
            for part in (Part.P16, Part.FROZEN16)
            if own.num_positions(part)
        }
        slots = [
            _slot(own, entry.name, whole[_part_of(entry)], dtype)
            for entry in own.tensors
            if _part_of(entry) in whole
        ]
        layouts[segment] = ParameterLayout(slots=tuple(slots), num_bytes=end_bytes)
    by_owner: dict[BlockId, list[str]] = {}
    for name, owner in borrowed:
        by_owner.setdefault(owner, []).append(name)
    for owner, names in by_owner.items():
        block = layout.block(owner)
        slots = []
        for name in names:
            _, place = layout.find(name)
            part = _part_of(place.entry)
            begin = place.begin // GRAIN * GRAIN
            end = min(-(-place.end // GRAIN) * GRAIN, block.num_positions(part))
            slots.append(_slot(block, name, add(owner, part, begin, end), dtype))
        layouts[owner] = ParameterLayout(slots=tuple(slots), num_bytes=end_bytes)
    return SegmentWeights(pieces=tuple(pieces), num_bytes=end_bytes, layouts=layouts)


def _part_of(entry: TensorEntry) -> Part:
    return Part.P16 if entry.is_trainable else Part.FROZEN16


def _slot(block: BlockLayout, name: str, piece: WeightPiece, dtype: torch.dtype) -> ParameterSlot:
    place = next(one for one in block.places if one.entry.name == name)
    return ParameterSlot(
        name=name,
        shape=place.entry.shape,
        dtype=dtype,
        offset_bytes=piece.offset_bytes + (place.begin - piece.begin) * 2,
    )
