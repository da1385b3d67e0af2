"""Which ranges of main memory are pinned: the bookkeeping every device shares.

Owns the checks (no overlap, no unpinning of what is not pinned) and nothing else: what pinning does
is a pair of functions given by the device, or nothing at all.
"""

import threading
from collections.abc import Callable

from lohan.errors import HardwareError


def _nothing(*_: int) -> None:
    """Pinning means nothing where the device reads main memory itself."""


class PinnedRanges:
    """Ranges pinned now. Safe from any thread."""

    def __init__(
        self,
        lock_range: Callable[[int, int], None] = _nothing,
        unlock_range: Callable[[int], None] = _nothing,
    ) -> None:
        self._lock_range, self._unlock_range = lock_range, unlock_range
        self._nbytes_at: dict[int, int] = {}
        self._lock = threading.Lock()

    def pin(self, address: int, nbytes: int) -> None:
        """Pin a range. Raises HardwareError if it is empty or overlaps a pinned one."""
        with self._lock:
            if address <= 0 or nbytes <= 0:
                raise HardwareError(
                    f"{nbytes} bytes at address {address} cannot be pinned",
                    why="there is no memory there",
                    remedy="pin buffers that hold at least one byte",
                )
            for start, length in self._nbytes_at.items():
                if address < start + length and start < address + nbytes:
                    raise HardwareError(
                        f"{nbytes} bytes at {address:#x} overlap {length} bytes at {start:#x} that "
                        "are pinned already",
                        why="memory can be pinned once",
                        remedy="unpin the old range first, or pin one range that covers both",
                    )
            self._lock_range(address, nbytes)
            self._nbytes_at[address] = nbytes

    def unpin(self, address: int) -> None:
        """Unpin the range that starts at the address. Raises HardwareError if there is none."""
        with self._lock:
            if address not in self._nbytes_at:
                raise HardwareError(
                    f"nothing is pinned at {address:#x}",
                    why=f"{len(self._nbytes_at)} ranges are pinned and none starts there",
                    remedy="unpin with the address that was pinned",
                )
            self._unlock_range(address)
            del self._nbytes_at[address]

    def unpin_all(self) -> None:
        """Unpin whatever is left."""
        with self._lock:
            while self._nbytes_at:
                address, _ = self._nbytes_at.popitem()
                self._unlock_range(address)
