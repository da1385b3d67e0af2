"""Extents: who has which range of a logical space, and which ranges are free again.

Owns allocation and freeing, all in numbers. Pure: no files. Used by `striped_file`.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from lohan.errors import LohanError, OutOfSpace, bug
from lohan.ssd.engines.engine import ALIGNMENT_BYTES, whole_pages
from lohan.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Extent:
    """An allocated range of a striped file, on multiples of 4096."""

    offset_bytes: int
    """In the logical space of the striped file."""
    nbytes: int
    """Rounded up to whole pages."""


class ExtentAllocator:
    """Gives out ranges of [0, capacity): the smallest free one that fits, lowest address first."""

    def __init__(self, capacity_bytes: int, *, taken: Iterable[Extent] = ()) -> None:
        self._capacity_bytes = capacity_bytes
        self._taken: dict[int, Extent] = {}
        # Free ranges as (offset, bytes), sorted, never touching each other.
        self._free: list[tuple[int, int]] = []
        position = 0
        for extent in sorted(taken):
            end = extent.offset_bytes + extent.nbytes
            if (
                extent.offset_bytes < position
                or extent.nbytes <= 0
                or end > capacity_bytes
                or (extent.offset_bytes | extent.nbytes) % ALIGNMENT_BYTES
            ):
                raise bug(
                    f"extent {extent} cannot be taken over: it overlaps another one, is not "
                    f"aligned, or leaves the {capacity_bytes} bytes there are"
                )
            if extent.offset_bytes > position:
                self._free.append((position, extent.offset_bytes - position))
            self._taken[extent.offset_bytes] = extent
            position = end
        if position < capacity_bytes:
            self._free.append((position, capacity_bytes - position))

    @property
    def capacity_bytes(self) -> int:
        """Size of the whole space."""
        return self._capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in no extent."""
        return sum(nbytes for _, nbytes in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """Largest extent that could be allocated now."""
        return max((nbytes for _, nbytes in self._free), default=0)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """All extents, by offset."""
        return tuple(sorted(self._taken.values()))

    def allocate(self, nbytes: int) -> Extent:
        """Take a range of at least `nbytes`.

        Raises:
            OutOfSpace: no free range is long enough.
        """
        if nbytes <= 0:
            raise bug(f"an extent of {nbytes} bytes was asked for")
        rounded = whole_pages(nbytes)
        fitting = [entry for entry in self._free if entry[1] >= rounded]
        if not fitting:
            raise OutOfSpace(
                f"an extent of {format_bytes(rounded)} does not fit",
                why=f"{format_bytes(self.free_bytes)} of {format_bytes(self._capacity_bytes)} are "
                f"free, the largest run has {format_bytes(self.largest_free_bytes)}",
                remedy="free extents first, or make the striped file larger",
                asked_bytes=rounded,
            )
        offset, run = min(fitting, key=lambda entry: (entry[1], entry[0]))
        place = bisect.bisect_left(self._free, (offset, run))
        if run == rounded:
            del self._free[place]
        else:
            self._free[place] = (offset + rounded, run - rounded)
        extent = Extent(offset_bytes=offset, nbytes=rounded)
        self._taken[offset] = extent
        return extent

    def free(self, extent: Extent) -> None:
        """Give a range back; it joins the free ranges next to it.

        Raises:
            ScheduleError: it is not allocated (any more).
        """
        if self._taken.get(extent.offset_bytes) != extent:
            raise unknown_extent(extent)
        del self._taken[extent.offset_bytes]
        self._insert_free(extent.offset_bytes, extent.nbytes)

    def holds(self, extent: Extent) -> bool:
        """Whether the extent is allocated."""
        return self._taken.get(extent.offset_bytes) == extent

    def _insert_free(self, offset: int, nbytes: int) -> None:
        place = bisect.bisect_left(self._free, (offset, 0))
        if place < len(self._free) and offset + nbytes == self._free[place][0]:
            nbytes += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == offset:
            before = self._free.pop(place - 1)
            offset, nbytes, place = before[0], before[1] + nbytes, place - 1
        self._free.insert(place, (offset, nbytes))


def unknown_extent(extent: Extent) -> LohanError:
    """The error for using or freeing an extent that is not allocated."""
    return bug(f"{extent} is not allocated: it was freed before, or belongs to another file")
