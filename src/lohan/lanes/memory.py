"""Memory behind the leases of a schedule: exact sizes, kept for reuse, never above the budget.

Owns host buffers (page-aligned, pinned for the device) and which lease holds which memory. When a
lease may be taken is the schedule's business (`executor`); here a lease that finds no room is a
mistake and an error. Called by the actions of lanes, on their threads.

Note "One piece". Pinning takes a driver about a second for a few GiB, and holds up what others ask
of it. So where the device copies, all of the budget is taken and pinned before the first step, and
buffers are parts of that. Parts of many sizes may leave holes in which a buffer does not fit though
there is room for it in all: it is made by itself then, beside the piece, and pinned on its lane. So
is every buffer where the system does not pin the piece.
"""

import threading
from collections.abc import Callable

from lohan.device.device import Device
from lohan.device.memory import DeviceMemory
from lohan.errors import HardwareError, bug
from lohan.schedule.task import Lease
from lohan.ssd import Buffer, BufferPool, whole_pages
from lohan.units import format_bytes
from lohan.vocabulary import PoolName


def try_to_pin(
    device: Device, address: int, nbytes: int, on_refused: Callable[[HardwareError], None]
) -> bool:
    """Pin memory. Where the system refuses, copies still work, only slower: it is told."""
    try:
        device.pin(address, nbytes)
    except HardwareError as error:
        on_refused(error)
        return False
    return True


class _Holes:
    """Which bytes of one piece of memory are free. Called with the lock of `RamMemory` held."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes_at = {0: nbytes} if nbytes else {}

    def take(self, nbytes: int) -> int | None:
        """Where so many bytes are, in the smallest hole that has them; None if none has."""
        fitting = [(size, at) for at, size in self._nbytes_at.items() if size >= nbytes]
        if not fitting:
            return None
        size, at = min(fitting)
        del self._nbytes_at[at]
        if size > nbytes:
            self._nbytes_at[at + nbytes] = size - nbytes
        return at

    def give_back(self, at: int, nbytes: int) -> None:
        """These are free again, and one hole with what is free beside them."""
        nbytes += self._nbytes_at.pop(at + nbytes, 0)
        for before, size in self._nbytes_at.items():
            if before + size == at:
                at, nbytes = before, size + nbytes
                break
        self._nbytes_at[at] = nbytes


class RamMemory:
    """Aligned main memory within one budget: parts of one piece, or buffers that wait for the next
    of their size once they are freed. See note "One piece".

    Runs on: any thread. May block: for as long as new pages take to exist.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: Device,
        *,
        on_refused_pin: Callable[[HardwareError], None] = lambda _: None,
    ) -> None:
        """`on_refused_pin` is told of memory the system does not pin, on the thread that asked."""
        self.budget_bytes = budget_bytes
        self._on_refused_pin = on_refused_pin
        self._device = device
        self._pool = BufferPool("schedule buffers")
        self._lock = threading.Lock()
        self._waiting: dict[int, list[Buffer]] = {}
        self._in_use_bytes = 0
        self._held_bytes = 0
        self._peak_bytes = 0
        self._pinned: set[int] = set()
        self._is_closed = False
        self._piece: Buffer | None = None
        if not device.shares_ram and budget_bytes > 0:
            piece = self._make(whole_pages(budget_bytes), on_refused=lambda _: None)
            if piece.address in self._pinned:
                self._piece = piece
            else:
                self._let_go(piece)
        self._holes = _Holes(self._piece.nbytes if self._piece is not None else 0)
        self._places: dict[int, int] = {}
        """Where in the piece leased parts are, by address."""

    @property
    def in_use_bytes(self) -> int:
        """Bytes of leased buffers."""
        return self._in_use_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once, leased or waiting."""
        return self._peak_bytes

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes` in whole pages.

        Raises:
            ScheduleError: the budget would be exceeded: the schedule's pools do not hold.
        """
        nbytes = whole_pages(max(1, nbytes))
        with self._lock:
            if self._in_use_bytes + nbytes > self.budget_bytes:
                raise bug(
                    f"{format_bytes(nbytes)} of RAM were asked for with "
                    f"{format_bytes(self._in_use_bytes)} of {format_bytes(self.budget_bytes)} in "
                    "use"
                )
            self._in_use_bytes += nbytes
            place = self._holes.take(nbytes)
            if place is not None:
                assert self._piece is not None
                part = self._pool.part_of(self._piece, place, nbytes)
                self._places[part.address] = place
                return part
            alike = self._waiting.get(nbytes)
            if alike:
                return alike.pop()
            gone = self._evict(self._held_bytes + nbytes - self.budget_bytes)
        for buffer in gone:
            self._let_go(buffer)
        try:
            return self._make(nbytes, self._on_refused_pin)
        except BaseException:
            with self._lock:
                self._in_use_bytes -= nbytes
            raise

    def _make(self, nbytes: int, on_refused: Callable[[HardwareError], None]) -> Buffer:
        buffer = self._pool.allocate(nbytes)
        with self._lock:
            self._held_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._held_bytes)
        if try_to_pin(self._device, buffer.address, nbytes, on_refused):
            with self._lock:
                self._pinned.add(buffer.address)
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back."""
        with self._lock:
            self._in_use_bytes -= buffer.nbytes
            place = self._places.pop(buffer.address, None)
            if place is not None:
                self._holes.give_back(place, buffer.nbytes)
                self._pool.take_back(buffer)
                return
            self._waiting.setdefault(buffer.nbytes, []).append(buffer)

    def close(self) -> None:
        """Give everything to the system, leased or not. Twice is fine."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            gone = [buffer for alike in self._waiting.values() for buffer in alike]
            gone += [self._piece] if self._piece is not None else []
            self._waiting.clear()
        for buffer in gone:
            self._let_go(buffer)

    def _evict(self, nbytes: int) -> list[Buffer]:
        """With the lock held: the largest waiting buffers that make up `nbytes`."""
        gone = []
        for size in sorted(self._waiting, reverse=True):
            alike = self._waiting[size]
            while alike and nbytes > 0:
                gone.append(alike.pop())
                nbytes -= size
        return gone

    def _let_go(self, buffer: Buffer) -> None:
        with self._lock:
            self._held_bytes -= buffer.nbytes
            is_pinned = buffer.address in self._pinned
            self._pinned.discard(buffer.address)
        if is_pinned:
            self._device.unpin(buffer.address)
        self._pool.take_back(buffer)


class LeaseBook:
    """Which memory each lease holds. Runs on: any thread; a lease has one owner at a time."""

    def __init__(self, host: RamMemory, device: Device) -> None:
        self.host, self.device = host, device
        self._lock = threading.Lock()
        self._held: dict[tuple[PoolName, str], Buffer | DeviceMemory] = {}

    def ram_buffer(self, lease: Lease, nbytes: int) -> Buffer:
        """Take main memory for a lease."""
        buffer = self.host.allocate(nbytes)
        self._enter(lease, buffer)
        return buffer

    def device_memory(self, lease: Lease, nbytes: int) -> DeviceMemory:
        """Take device memory for a lease."""
        memory = self.device.alloc(nbytes)
        self._enter(lease, memory)
        return memory

    def move(self, source: Lease, target: Lease) -> None:
        """Hand the memory of one lease over to another: a copy that need not happen."""
        with self._lock:
            self._held[target.pool, target.key] = self._held.pop((source.pool, source.key))

    def give_back(self, lease: Lease) -> None:
        """A lease ends: free its memory, if it holds any."""
        with self._lock:
            held = self._held.pop((lease.pool, lease.key), None)
        if held is not None:
            self._free(held)

    def clear(self) -> None:
        """Free everything; nothing may be in flight."""
        with self._lock:
            left = list(self._held.values())
            self._held.clear()
        for held in left:
            self._free(held)

    def _enter(self, lease: Lease, memory: Buffer | DeviceMemory) -> None:
        with self._lock:
            is_taken = (lease.pool, lease.key) in self._held
            self._held.setdefault((lease.pool, lease.key), memory)
        if is_taken:
            self._free(memory)
            raise bug(f"the lease {lease.key} of pool {lease.pool} has memory already")

    def _free(self, memory: Buffer | DeviceMemory) -> None:
        if isinstance(memory, DeviceMemory):
            self.device.free(memory, is_idle=True)  # a lease ends when the device is done with it
        else:
            self.host.free(memory)
