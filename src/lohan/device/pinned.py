"""Which ranges of main memory are pinned: the bookkeeping every device shares.

Owns the checks (no overlap, no unpinning of what is not pinned) and nothing else: what pinning does
is a pair of functions given by the device, or nothing at all.
"""

import threading
from collections.abc import Callable

from lohan.errors import HardwareError, bug


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
                raise bug(
                    f"{nbytes} bytes at address {address} cannot be pinned: there is no memory "
                    "there",
                    HardwareError,
                )
            for start, length in self._nbytes_at.items():
                if address < start + length and start < address + nbytes:
                    raise bug(
                        f"{nbytes} bytes at {address:#x} overlap {length} bytes at {start:#x} that "
                        "are pinned already",
                        HardwareError,
                    )
            self._lock_range(address, nbytes)
            self._nbytes_at[address] = nbytes

    def unpin(self, address: int) -> None:
        """Unpin the range that starts at the address. Raises HardwareError if there is none."""
        with self._lock:
            if address not in self._nbytes_at:
                raise bug(f"nothing is pinned at {address:#x}", HardwareError)
            self._unlock_range(address)
            del self._nbytes_at[address]

    def unpin_all(self) -> None:
        """Unpin whatever is left."""
        with self._lock:
            while self._nbytes_at:
                address, _ = self._nbytes_at.popitem()
                self._unlock_range(address)
