"""What a parameter's state consists of and where it lies: flat arrays, one per part.

Owns the number formats, the parts that follow from them (docs/decisions/0007 tells how numbers are
split and rounded), the arithmetic from (tensor) to (part, position) to (byte range), and its JSON
form. Pure: no files, no memory, no torch. Used by every file of this folder; kept in the manifest.

Note "positions". The trainable tensors of a block lie one behind the other in a flat array, each
starting at a multiple of 32; a place in that array is a position. All parts of a block (P16, LO16,
M32, ...) are arrays over the same positions, so a range [begin, end) of positions is one byte range
in each of them. Frozen tensors have positions of their own, in an array that has one part only:
ranges of trainable positions stay contiguous, and frozen weights cost 2 bytes. Positions between
two tensors are padding and hold zeros, which an update leaves zero. 32 positions of P16 are the 64
bytes at which parameters in flat compute buffers start, so P16 is used where it was read to.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from msgspec import to_builtins

from lohan.errors import CheckpointError, ConfigError, bug, nearest_names
from lohan.fields import convert
from lohan.ssd import whole_pages
from lohan.ssd.layout import damaged_fields, refuse_other_version
from lohan.vocabulary import BlockId, TensorKind

STATE_LAYOUT_VERSION = 1
TENSOR_ALIGNMENT = 32
"""Tensors start at multiples of this many positions."""
GRAIN = 2048
"""Ranges of positions that move begin at multiples of this: a page of the narrowest part."""


class ComputeFormat(StrEnum):
    """Format of the weights compute uses."""

    BF16 = "bf16"
    FP16 = "fp16"


class MasterFormat(StrEnum):
    """How fp32 masters are kept beside P16; with the compute format it decides the parts."""

    SPLIT = "split"
    """Only what P16 lacks of them, in LO16: 12 bytes per parameter. bf16 compute only."""
    WHOLE = "whole"
    """In full, in P32: 14 bytes per parameter, as other systems store them."""

    @classmethod
    def default_for(cls, compute_format: ComputeFormat) -> "MasterFormat":
        """The smaller one where there is a choice."""
        return cls.SPLIT if compute_format is ComputeFormat.BF16 else cls.WHOLE


class Part(StrEnum):
    """One array of a block's state. docs/decisions/0007 states the number formats."""

    P16 = "P16"
    """Compute weights of trainable parameters."""
    LO16 = "LO16"
    """What P16 lacks of the fp32 master (split masters)."""
    P32 = "P32"
    """The fp32 master (whole masters)."""
    M32 = "M32"
    """First moment."""
    V32 = "V32"
    """Second moment; in the split state its sign bit carries a rounding tie."""
    FROZEN16 = "FROZEN16"
    """Compute weights of frozen parameters, which have nothing else."""

    @property
    def bytes_per_parameter(self) -> int:
        """2 or 4."""
        return 4 if self in (Part.P32, Part.M32, Part.V32) else 2

    @property
    def kind(self) -> TensorKind:
        """The word of plans and schedules this part belongs to."""
        if self in (Part.P16, Part.FROZEN16):
            return TensorKind.P16
        return TensorKind.P32 if self in (Part.LO16, Part.P32) else TensorKind.OS32

    @property
    def is_frozen(self) -> bool:
        """Whether its positions are those of frozen tensors, never written after the fill."""
        return self is Part.FROZEN16


TRAINABLE_PARTS: Mapping[MasterFormat, tuple[Part, ...]] = {
    MasterFormat.SPLIT: (Part.P16, Part.LO16, Part.M32, Part.V32),
    MasterFormat.WHOLE: (Part.P16, Part.P32, Part.M32, Part.V32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Bytes of one part, from the start of the part, in whole pages."""

    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A parameter as the model names it."""

    name: str
    shape: tuple[int, ...]
    is_trainable: bool = True

    def __post_init__(self) -> None:
        if not self.name or any(side < 0 for side in self.shape):
            raise ConfigError(
                f"a tensor has the name {self.name!r} and the shape {self.shape}",
                why="a name has at least one character, a side is not negative",
                remedy="give the parameters as `named_parameters` does",
            )

    @property
    def num_parameters(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Positions of a tensor in its flat array: the trainable or the frozen one."""

    entry: TensorEntry
    begin: int

    @property
    def end(self) -> int:
        """The position behind its last one."""
        return self.begin + self.entry.num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The flat arrays of one block. Tensors keep the order they are given in."""

    name: str
    """For messages, such as `model.layers.3`."""
    compute_format: ComputeFormat
    master_format: MasterFormat
    tensors: tuple[TensorEntry, ...]
    places: tuple[TensorPlace, ...] = field(init=False, repr=False, compare=False)
    num_trainable: int = field(init=False, repr=False, compare=False)
    """Positions of the trainable array, padding included."""
    num_frozen: int = field(init=False, repr=False, compare=False)
    """Positions of the frozen array, padding included."""

    def __post_init__(self) -> None:
        ends = {True: 0, False: 0}
        places = []
        for entry in self.tensors:
            place = TensorPlace(entry=entry, begin=ends[entry.is_trainable])
            places.append(place)
            ends[entry.is_trainable] = -(-place.end // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
        object.__setattr__(self, "places", tuple(places))
        object.__setattr__(self, "num_trainable", ends[True])
        object.__setattr__(self, "num_frozen", ends[False])

    @property
    def trainable_parts(self) -> tuple[Part, ...]:
        """Parts an update writes; none if every tensor is frozen."""
        return TRAINABLE_PARTS[self.master_format] if self.num_trainable else ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts that have at least one byte."""
        return (*self.trainable_parts, *((Part.FROZEN16,) if self.num_frozen else ()))

    def num_positions(self, part: Part) -> int:
        """Length of the array of a part; 0 for a part this block does not have."""
        if part not in self.parts:
            return 0
        return self.num_frozen if part.is_frozen else self.num_trainable

    def part_bytes(self, part: Part) -> int:
        """Bytes of a part in whole pages: what its extent and its RAM buffer have."""
        return whole_pages(self.num_positions(part) * part.bytes_per_parameter)

    def byte_range(self, part: Part, begin: int, end: int) -> ByteRange:
        """Where positions [begin, end) of a part lie, in whole pages.

        Raises:
            ScheduleError: the range is empty, leaves the array, or does not begin and end at
                multiples of `GRAIN` (or at the end of the array).
        """
        length = self.num_positions(part)
        if not 0 <= begin < end <= length or begin % GRAIN or (end % GRAIN and end != length):
            raise bug(
                f"positions [{begin}, {end}) of {part} of block {self.name} were asked for, which "
                f"has {length}; ranges begin and end at multiples of {GRAIN} or at its end"
            )
        offset_bytes = begin * part.bytes_per_parameter
        end_bytes = whole_pages(end * part.bytes_per_parameter)
        return ByteRange(offset_bytes=offset_bytes, nbytes=end_bytes - offset_bytes)

    def chunk(self, begin: int, end: int) -> dict[Part, ByteRange]:
        """Where the trainable positions [begin, end) lie in each part."""
        return {part: self.byte_range(part, begin, end) for part in self.trainable_parts}

    def chunks(self, num_positions: int) -> Iterator[tuple[int, int]]:
        """Cut the trainable positions into ranges of `num_positions`; the last may be shorter.

        Raises:
            ConfigError: the number is not a multiple of `GRAIN` above zero.
        """
        if num_positions <= 0 or num_positions % GRAIN:
            raise ConfigError(
                f"chunks of {num_positions} parameters were asked for",
                why=f"chunks begin at pages of every part: multiples of {GRAIN} parameters",
                remedy=f"give a multiple of {GRAIN}",
            )
        for begin in range(0, self.num_trainable, num_positions):
            yield begin, min(begin + num_positions, self.num_trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """All blocks of a model; a `BlockId` is the position in `blocks`."""

    compute_format: ComputeFormat
    master_format: MasterFormat
    blocks: tuple[BlockLayout, ...]
    _homes: Mapping[str, tuple[BlockId, TensorPlace]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.master_format is MasterFormat.SPLIT and self.compute_format is ComputeFormat.FP16:
            raise ConfigError(
                "split masters were asked for with fp16 compute",
                why="fp16 is not the upper half of fp32, so a master is not P16 and a rest",
                remedy="keep whole masters, or compute in bf16",
            )
        homes: dict[str, tuple[BlockId, TensorPlace]] = {}
        for number, block in enumerate(self.blocks):
            own = (block.compute_format, block.master_format)
            if own != (self.compute_format, self.master_format):
                raise ConfigError(
                    f"block {block.name} is {own[0]} with {own[1]} masters, the model "
                    f"{self.compute_format} with {self.master_format} masters",
                    why="all blocks share one format",
                    remedy="make the layout with `StateLayout.pack`",
                )
            for place in block.places:
                name = place.entry.name
                if name in homes:
                    raise ConfigError(
                        f"the tensor {name} is in {self.blocks[homes[name][0]].name} and in "
                        f"{block.name}",
                        why="a parameter has one home, or two updates would drift apart",
                        remedy="list a tied parameter once, in the block that owns it",
                    )
                homes[name] = (BlockId(number), place)
        object.__setattr__(self, "_homes", homes)

    @classmethod
    def pack(
        cls,
        blocks: Mapping[str, tuple[TensorEntry, ...]],
        *,
        compute_format: ComputeFormat = ComputeFormat.BF16,
        master_format: MasterFormat | None = None,
    ) -> "StateLayout":
        """Lay out blocks given as name and tensors, in order.

        Raises:
            ConfigError: split masters with fp16 compute; a name twice.
        """
        masters = master_format or MasterFormat.default_for(compute_format)
        return cls(
            compute_format=compute_format,
            master_format=masters,
            blocks=tuple(
                BlockLayout(
                    name=name,
                    compute_format=compute_format,
                    master_format=masters,
                    tensors=tuple(tensors),
                )
                for name, tensors in blocks.items()
            ),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, block by block."""
        return tuple(self._homes)

    def block(self, block: BlockId) -> BlockLayout:
        """The layout of one block.

        Raises:
            ScheduleError: there is no such block.
        """
        if not 0 <= block < len(self.blocks):
            raise bug(
                f"block {block} of a model that has {len(self.blocks)} blocks, counted from 0"
            )
        return self.blocks[block]

    def find(self, name: str) -> tuple[BlockId, TensorPlace]:
        """Block and place of a tensor.

        Raises:
            ConfigError: no tensor has this name.
        """
        if name not in self._homes:
            raise ConfigError(
                f"there is no tensor {name!r} in this model's states",
                why=f"the layout knows {len(self._homes)} names",
                remedy=nearest_names(name, self._homes)
                if len(self._homes) <= 20
                else "check that the weights belong to this model",
            )
        return self._homes[name]

    def slot_bytes(self) -> int:
        """SSD bytes of all trainable parts, once."""
        return sum(
            block.part_bytes(part) for block in self.blocks for part in block.trainable_parts
        )

    def frozen_bytes(self) -> int:
        """SSD bytes of all frozen parts."""
        return sum(block.part_bytes(Part.FROZEN16) for block in self.blocks)

    def to_json(self) -> dict[str, Any]:
        """As plain values for the manifest."""
        return {
            "version": STATE_LAYOUT_VERSION,
            "compute_format": self.compute_format.value,
            "master_format": self.master_format.value,
            "blocks": [
                {"name": block.name, "tensors": to_builtins(block.tensors)} for block in self.blocks
            ],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "StateLayout":
        """Rebuild what `to_json` gave.

        Raises:
            CheckpointError: the fields are of another version or not those of a layout.
        """
        refuse_other_version("state layout", fields, STATE_LAYOUT_VERSION)
        try:
            file = convert(fields, LayoutFile, where="layout")
            # States saved before there was a choice do not name it.
            master_format = file.master_format or MasterFormat.default_for(file.compute_format)
            blocks = tuple(
                BlockLayout(
                    name=block.name,
                    compute_format=file.compute_format,
                    master_format=master_format,
                    tensors=block.tensors,
                )
                for block in file.blocks
            )
            return cls(
                compute_format=file.compute_format, master_format=master_format, blocks=blocks
            )
        except ConfigError as error:
            raise damaged_fields("state layout", error) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockInFile:
    name: str
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFile:
    """A layout as a manifest holds it."""

    version: int
    compute_format: ComputeFormat
    master_format: MasterFormat | None = None
    blocks: tuple[_BlockInFile, ...]


def refuse_other_layout(saved: StateLayout, wanted: StateLayout) -> None:
    """Refuse saved states whose layout is not that of the model at hand.

    Raises:
        CheckpointError: they differ; the first difference is named.
    """
    if saved == wanted:
        return
    difference = f"{len(saved.blocks)} blocks are saved, the model has {len(wanted.blocks)}"
    if saved.compute_format is not wanted.compute_format:
        saved_for, computes_in = saved.compute_format.value, wanted.compute_format.value
        difference = f"saved for {saved_for}, the model computes in {computes_in}"
    elif saved.master_format is not wanted.master_format:
        saved_as, keeps = saved.master_format.value, wanted.master_format.value
        difference = f"saved with {saved_as} masters, the policy keeps {keeps} ones"
    else:
        for old, now in zip(saved.blocks, wanted.blocks, strict=False):
            if old != now:
                difference = _first_difference(old, now)
                break
    raise CheckpointError(
        f"the saved states do not fit the model ({difference})",
        why="their bytes would be given to other parameters",
        remedy="resume with the model, precision, trainable parameters and policy the run was made "
        "with",
    )


def _first_difference(saved: BlockLayout, wanted: BlockLayout) -> str:
    pairs = zip((*saved.tensors, None), (*wanted.tensors, None), strict=False)
    for old, now in pairs:
        if old != now:
            return f"in block {wanted.name}: saved {old}, the model has {now}"
    return f"block {saved.name} is saved, the model has {wanted.name}"
