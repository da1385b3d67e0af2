"""CRC-32C checksums of the ranges that were written.

Owns the table of ranges and their checksums. Computing over memory is native.
Pure but for that: no files. Used by `striped_file`.

Note "ranges of checksums". Every finished write leaves one checksum per stretch it wrote. A later
write over part of a stretch makes the old checksum useless, and it is dropped: the rest of the
stretch then has none. Neighbouring stretches can be joined into one without reading a byte, because
the checksum of A followed by B follows from those of A and B.
"""

import bisect
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from lohan import _native

ALGORITHM = "crc32c"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Stretch:
    """A range of logical bytes and the checksum of what was written there."""

    offset_bytes: int
    nbytes: int
    checksum: int

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset_bytes + self.nbytes


def checksum_memory(address: int, nbytes: int, before: int = 0) -> int:
    """CRC-32C of memory, continued from `before`. Releases the interpreter's lock."""
    return _native.crc32c(before, address, nbytes)


def join_checksums(first: int, second: int, second_nbytes: int) -> int:
    """CRC-32C of two stretches put together, from their own."""
    return _native.crc32c_join(first, second, second_nbytes)


def checksum_stretches(
    offset_bytes: int, address: int, nbytes: int, chunk_bytes: int
) -> list[Stretch]:
    """Checksums of memory that is at `offset_bytes` of a file, cut at multiples of `chunk_bytes`.

    Always cut at the same places, so that what was written in large pieces can be verified in
    smaller ones.
    """
    stretches = []
    position = 0
    while position < nbytes:
        room_bytes = chunk_bytes - (offset_bytes + position) % chunk_bytes
        count = min(room_bytes, nbytes - position)
        stretches.append(
            Stretch(
                offset_bytes=offset_bytes + position,
                nbytes=count,
                checksum=checksum_memory(address + position, count),
            )
        )
        position += count
    return stretches


class ChecksumTable:
    """What is known about the bytes of a logical space. Runs on: any thread. May block: no."""

    def __init__(self, stretches: Iterable[Stretch] = ()) -> None:
        self._lock = threading.Lock()
        ordered = sorted(stretches)
        self._offsets = [stretch.offset_bytes for stretch in ordered]
        self._stretches = ordered

    def forget(self, offset_bytes: int, nbytes: int) -> None:
        """Drop every stretch that touches this range: its bytes are about to change."""
        with self._lock:
            first, last = self._touching(offset_bytes, nbytes)
            del self._stretches[first:last]
            del self._offsets[first:last]

    def record(self, stretch: Stretch) -> None:
        """Enter what was written, in place of what was there."""
        with self._lock:
            first, last = self._touching(stretch.offset_bytes, stretch.nbytes)
            self._stretches[first:last] = [stretch]
            self._offsets[first:last] = [stretch.offset_bytes]

    def refine(self, stretch: Stretch, parts: tuple[Stretch, ...]) -> None:
        """Put `parts` in the place of the stretch they make up, if it is still the one known."""
        with self._lock:
            first, last = self._touching(stretch.offset_bytes, stretch.nbytes)
            if self._stretches[first:last] == [stretch]:
                self._stretches[first:last] = parts
                self._offsets[first:last] = [part.offset_bytes for part in parts]

    def inside(self, offset_bytes: int, nbytes: int) -> tuple[Stretch, ...]:
        """Stretches that lie wholly inside this range, by offset."""
        end = offset_bytes + nbytes
        with self._lock:
            first, last = self._touching(offset_bytes, nbytes)
            return tuple(
                stretch
                for stretch in self._stretches[first:last]
                if stretch.offset_bytes >= offset_bytes and stretch.end_bytes <= end
            )

    def covers(self, offset_bytes: int, nbytes: int) -> bool:
        """Whether the stretches inside this range leave no byte of it out."""
        return sum(stretch.nbytes for stretch in self.inside(offset_bytes, nbytes)) == nbytes

    def joined(self, offset_bytes: int, nbytes: int) -> int | None:
        """One checksum for the whole range, or None if part of it has none."""
        stretches = self.inside(offset_bytes, nbytes)
        if sum(stretch.nbytes for stretch in stretches) != nbytes:
            return None
        checksum = 0
        for stretch in stretches:
            checksum = join_checksums(checksum, stretch.checksum, stretch.nbytes)
        return checksum

    def stretches(self) -> tuple[Stretch, ...]:
        """All of them, by offset."""
        with self._lock:
            return tuple(self._stretches)

    def _touching(self, offset_bytes: int, nbytes: int) -> tuple[int, int]:
        first = bisect.bisect_right(self._offsets, offset_bytes)
        if first > 0 and self._stretches[first - 1].end_bytes > offset_bytes:
            first -= 1
        return first, bisect.bisect_left(self._offsets, offset_bytes + nbytes, lo=first)
