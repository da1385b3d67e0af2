"""Where the bytes of a striped file lie: logical chunks dealt out to drives by weight.

Owns the arithmetic between a logical offset and (drive, offset in its file), and its JSON form.
Pure: no files, no requests. Used by `striped_file`; kept in a manifest by higher parts.

Note "dealing chunks". The logical space is cut into chunks of one fixed size. A pattern of at most
a few dozen chunks says which drive gets which, and repeats. A drive gets its share of every
pattern, spread as evenly as whole chunks allow, so any long range keeps all drives busy at once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import to_builtins

from lohan.errors import CheckpointError, ConfigError
from lohan.fields import convert
from lohan.ssd.engines.engine import ALIGNMENT_BYTES
from lohan.units import MIB

CHUNK_BYTES = 4 * MIB
LAYOUT_VERSION = 1
_MAX_PATTERN_CHUNKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StripePiece:
    """A part of a logical range that lies in one stretch on one drive."""

    drive: int
    """Index of the drive in the layout."""
    offset_bytes: int
    """In the drive's file."""
    start_bytes: int
    """From the start of the logical range."""
    nbytes: int


def deal_chunks(weights: Sequence[float], max_chunks: int = _MAX_PATTERN_CHUNKS) -> tuple[int, ...]:
    """Return the repeating pattern of drives for these weights; the same every time.

    Of all pattern lengths up to `max_chunks` the one is taken whose slowest drive, if weights are
    rates, is done first; of equally good ones the shortest. A drive far slower than the others may
    get nothing: it would only hold them up.

    Raises:
        ConfigError: there are no weights, or one is not a number above zero.
    """
    if not weights or any(not math.isfinite(weight) or weight <= 0 for weight in weights):
        raise ConfigError(
            f"drive weights are {list(weights)}",
            why="every drive needs a weight above zero, such as its measured rate",
            remedy="give one rate per SSD directory, or none for equal shares",
        )
    num_drives = len(weights)
    total = sum(weights)
    best: tuple[float, list[int]] | None = None
    for length in range(1, max(max_chunks, 4 * num_drives) + 1):
        counts = _share(weights, length)
        # Time of the slowest drive against that of a perfect split: 1 is perfect.
        cost = max(
            count / length * total / weight for count, weight in zip(counts, weights, strict=True)
        )
        if best is None or cost < best[0] - 1e-9:
            best = (cost, counts)
    assert best is not None
    return _spread(best[1])


def _share(weights: Sequence[float], length: int) -> list[int]:
    """Deal `length` chunks one by one, each to the drive that would finish it first."""
    counts = [0] * len(weights)
    for _ in range(length):
        drive = min(range(len(weights)), key=lambda d: ((counts[d] + 1) / weights[d], d))
        counts[drive] += 1
    return counts


def _spread(counts: Sequence[int]) -> tuple[int, ...]:
    """Order the chunks so that those of one drive are as far apart as possible."""
    places = sorted(
        ((turn + 0.5) / count, drive) for drive, count in enumerate(counts) for turn in range(count)
    )
    return tuple(drive for _, drive in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeLayout:
    """The map of a striped file: chunk size, pattern, and how many chunks there are."""

    chunk_bytes: int
    num_drives: int
    pattern: tuple[int, ...]
    """Drive of each chunk of a repeating run of chunks."""
    num_chunks: int

    def __post_init__(self) -> None:
        if self.chunk_bytes <= 0 or self.chunk_bytes % ALIGNMENT_BYTES:
            raise ConfigError(
                f"chunk_bytes is {self.chunk_bytes}",
                why=f"chunks are multiples of {ALIGNMENT_BYTES} bytes",
                remedy="give a size such as 4 MiB",
            )
        if (
            not self.pattern
            or self.num_chunks < 0
            or not all(0 <= drive < self.num_drives for drive in self.pattern)
        ):
            raise ConfigError(
                f"a layout of {self.num_chunks} chunks over {self.num_drives} drives has the "
                f"pattern {self.pattern}",
                why="the pattern must name at least one drive, and only drives that are there",
                remedy="make layouts with `StripeLayout.plan`",
            )

    @classmethod
    def plan(
        cls,
        *,
        capacity_bytes: int,
        weights: Sequence[float],
        chunk_bytes: int = CHUNK_BYTES,
    ) -> "StripeLayout":
        """Lay out at least `capacity_bytes` over drives with these weights."""
        if capacity_bytes < 0:
            raise ConfigError(
                f"capacity is {capacity_bytes} bytes",
                why="it is negative",
                remedy="give 0 bytes or more",
            )
        pattern = deal_chunks(weights)
        num_chunks = -(-capacity_bytes // chunk_bytes) if chunk_bytes > 0 else 0
        return cls(
            chunk_bytes=chunk_bytes,
            num_drives=len(weights),
            pattern=pattern,
            num_chunks=num_chunks,
        )

    @property
    def capacity_bytes(self) -> int:
        """Logical bytes there is room for."""
        return self.num_chunks * self.chunk_bytes

    @property
    def shares(self) -> tuple[float, ...]:
        """Fraction of the chunks each drive gets."""
        return tuple(self.pattern.count(n) / len(self.pattern) for n in range(self.num_drives))

    def file_bytes(self, drive: int) -> int:
        """Size of a drive's file."""
        rounds, rest = divmod(self.num_chunks, len(self.pattern))
        num_here = rounds * self.pattern.count(drive) + self.pattern[:rest].count(drive)
        return num_here * self.chunk_bytes

    def pieces(self, offset_bytes: int, nbytes: int) -> Iterator[StripePiece]:
        """Cut a logical range where it changes drives; neighbours on one drive stay together.

        Raises:
            ConfigError: the range is empty, or not inside the file.
        """
        if offset_bytes < 0 or nbytes <= 0 or offset_bytes + nbytes > self.capacity_bytes:
            raise ConfigError(
                f"a range of {nbytes} bytes at {offset_bytes} was asked for",
                why=f"the striped file has {self.capacity_bytes} bytes",
                remedy="ask for at least one byte, inside of it",
            )
        open_piece: StripePiece | None = None
        position = offset_bytes
        end = offset_bytes + nbytes
        while position < end:
            chunk, inside = divmod(position, self.chunk_bytes)
            rounds, place = divmod(chunk, len(self.pattern))
            drive = self.pattern[place]
            rank = rounds * self.pattern.count(drive) + self.pattern[:place].count(drive)
            piece = StripePiece(
                drive=drive,
                offset_bytes=rank * self.chunk_bytes + inside,
                start_bytes=position - offset_bytes,
                nbytes=min(self.chunk_bytes - inside, end - position),
            )
            position += piece.nbytes
            if open_piece is not None and open_piece.drive == drive:
                # Two neighbouring chunks of one drive are neighbours in its file as well.
                open_piece = replace(open_piece, nbytes=open_piece.nbytes + piece.nbytes)
                continue
            if open_piece is not None:
                yield open_piece
            open_piece = piece
        assert open_piece is not None
        yield open_piece

    def to_json(self) -> dict[str, Any]:
        """As plain values for a manifest."""
        return {"version": LAYOUT_VERSION, **to_builtins(self)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "StripeLayout":
        """Rebuild what `to_json` gave.

        Raises:
            CheckpointError: the fields are of another version or not those of a layout.
        """
        refuse_other_version("striped layout", fields, LAYOUT_VERSION)
        try:
            return convert(fields, cls, where="layout")
        except ConfigError as error:
            raise damaged_fields("striped layout", error) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeFile:
    """A layout as a manifest holds it."""

    version: int
    chunk_bytes: int
    num_drives: int
    pattern: tuple[int, ...]
    num_chunks: int


def refuse_other_version(noun: str, fields: Mapping[str, Any], version: int) -> None:
    """Refuse saved fields this code cannot read.

    Raises:
        CheckpointError: the version is not the known one.
    """
    found = fields.get("version") if isinstance(fields, Mapping) else None
    if found != version:
        raise CheckpointError(
            f"a saved {noun} has version {found!r}",
            why=f"this lohan reads version {version}",
            remedy="use the lohan that wrote it",
        )


def damaged_fields(noun: str, error: Exception) -> CheckpointError:
    """The error for saved fields that make no sense."""
    return CheckpointError(
        f"a saved {noun} cannot be read ({type(error).__name__}: {error})",
        why="a field is missing or has an impossible value",
        remedy="restore the file it came from",
    )
