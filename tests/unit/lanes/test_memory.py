"""RAM behind leases: exact, reused, within the budget, and wholly given back."""

import random

import pytest

from lohan.device import CpuDevice
from lohan.errors import HardwareError, ScheduleError
from lohan.lanes.memory import LeaseBook, RamMemory, whole_pages
from lohan.schedule.task import Lease

PAGE = 4096


def test_buffers_of_a_size_are_used_again() -> None:
    memory = RamMemory(10 * PAGE, CpuDevice())
    first = memory.allocate(3 * PAGE)
    address = first.address
    memory.free(first)
    again = memory.allocate(2 * PAGE + 1)
    assert again.address == address
    memory.free(again)
    memory.close()


def test_waiting_buffers_make_room_for_other_sizes() -> None:
    memory = RamMemory(4 * PAGE, CpuDevice())
    for size in (1, 2, 3, 4, 2, 1):
        memory.free(memory.allocate(size * PAGE))
        assert memory.peak_bytes <= 4 * PAGE
    memory.close()


def test_what_would_exceed_the_budget_is_refused() -> None:
    memory = RamMemory(4 * PAGE, CpuDevice())
    held = memory.allocate(3 * PAGE)
    with pytest.raises(ScheduleError, match="asked for"):
        memory.allocate(2 * PAGE)
    memory.free(held)
    memory.close()


@pytest.mark.parametrize("seed", range(5))
def test_random_use_never_exceeds_the_budget(seed: int) -> None:
    chance = random.Random(seed)
    memory, held = RamMemory(64 * PAGE, CpuDevice()), []
    for _ in range(400):
        size = chance.randrange(1, 12 * PAGE)
        in_use = sum(buffer.nbytes for buffer in held)
        if in_use + whole_pages(size) <= 64 * PAGE and chance.random() < 0.6:
            held.append(memory.allocate(size))
        elif held:
            memory.free(held.pop(chance.randrange(len(held))))
        assert memory.in_use_bytes == sum(buffer.nbytes for buffer in held)
        assert memory.peak_bytes <= 64 * PAGE
    for buffer in held:
        memory.free(buffer)
    memory.close()


def test_memory_is_handed_from_lease_to_lease() -> None:
    memory = RamMemory(8 * PAGE, CpuDevice())
    book = LeaseBook(memory, CpuDevice())
    ring, weights = Lease("ring", "1", PAGE), Lease("weights", "1", PAGE)
    book.ram_buffer(ring, PAGE)
    book.move(ring, weights)
    book.give_back(ring)
    assert memory.in_use_bytes == PAGE
    book.give_back(weights)
    assert memory.in_use_bytes == 0
    memory.close()


def test_a_lease_holds_one_piece_of_memory() -> None:
    memory = RamMemory(8 * PAGE, CpuDevice())
    book = LeaseBook(memory, CpuDevice())
    lease = Lease("ring", "1", PAGE)
    book.ram_buffer(lease, PAGE)
    with pytest.raises(ScheduleError, match="has memory already"):
        book.ram_buffer(lease, PAGE)
    book.clear()
    assert memory.in_use_bytes == 0
    memory.close()


class CopyingDevice(CpuDevice):
    """Has memory of its own, as far as main memory is concerned; counts what it pins."""

    shares_ram = False

    def __init__(self, most_bytes: int = 1 << 40) -> None:
        super().__init__()
        self.pins: list[int] = []
        self._most_bytes = most_bytes

    def pin(self, address: int, nbytes: int) -> None:
        if nbytes > self._most_bytes:
            raise HardwareError("too much to pin", why="a limit", remedy="raise it")
        super().pin(address, nbytes)
        self.pins.append(nbytes)


def test_where_a_device_copies_everything_is_pinned_once_before_the_first_buffer() -> None:
    device = CopyingDevice()
    memory = RamMemory(8 * PAGE, device)
    assert device.pins == [8 * PAGE]
    held = [memory.allocate(size * PAGE) for size in (3, 1, 4)]
    begins = sorted((buffer.address, buffer.nbytes) for buffer in held)
    assert [first + size for first, size in begins[:-1]] == [first for first, _ in begins[1:]]
    for buffer in held:
        memory.free(buffer)
    assert memory.allocate(8 * PAGE).nbytes == 8 * PAGE, "holes beside each other are one"
    assert (device.pins, memory.peak_bytes) == ([8 * PAGE], 8 * PAGE)
    memory.close()
    device.pin(begins[0][0], PAGE)  # it is not pinned any more
    device.close()


def test_a_buffer_that_fits_into_no_hole_is_made_beside_the_piece() -> None:
    device = CopyingDevice()
    memory = RamMemory(6 * PAGE, device)
    held = [memory.allocate(2 * PAGE) for _ in range(3)]
    held[1].view[:] = b"1" * (2 * PAGE)
    for buffer in (held[0], held[2]):
        memory.free(buffer)
    beside = memory.allocate(4 * PAGE)
    beside.view[:] = b"2" * (4 * PAGE)
    assert bytes(held[1].view) == b"1" * (2 * PAGE)
    assert (device.pins, memory.peak_bytes) == ([6 * PAGE, 4 * PAGE], 10 * PAGE)
    memory.free(beside)
    assert memory.in_use_bytes == 2 * PAGE
    memory.free(held[1])
    memory.close()


def test_a_piece_too_large_to_be_pinned_is_none() -> None:
    device, told = CopyingDevice(2 * PAGE), list[HardwareError]()
    memory = RamMemory(8 * PAGE, device, on_refused_pin=told.append)
    memory.free(memory.allocate(2 * PAGE))
    assert (device.pins, told, memory.peak_bytes) == ([2 * PAGE], [], 8 * PAGE)
    memory.free(memory.allocate(3 * PAGE))
    assert [error.what for error in told] == ["too much to pin"]
    memory.close()


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_a_piece_never_overlap(seed: int) -> None:
    chance = random.Random(seed)
    memory, held = RamMemory(64 * PAGE, CopyingDevice()), []
    for number in range(300):
        size = chance.randrange(1, 12 * PAGE)
        in_use = sum(buffer.nbytes for buffer, _ in held)
        if in_use + whole_pages(size) <= 64 * PAGE and chance.random() < 0.6:
            buffer = memory.allocate(size)
            buffer.array()[:] = number % 251
            held.append((buffer, number % 251))
        elif held:
            buffer, value = held.pop(chance.randrange(len(held)))
            assert (buffer.array() == value).all()
            memory.free(buffer)
    assert memory.in_use_bytes == sum(buffer.nbytes for buffer, _ in held)
    memory.close()


class UnpinnableDevice(CpuDevice):
    """The system pins nothing."""

    def pin(self, address: int, nbytes: int) -> None:
        raise HardwareError("no pinning", why="a limit", remedy="raise it")


def test_memory_that_is_not_pinned_is_told_and_works() -> None:
    told: list[HardwareError] = []
    memory = RamMemory(4 * PAGE, UnpinnableDevice(), on_refused_pin=told.append)
    buffer = memory.allocate(PAGE)
    assert [error.what for error in told] == ["no pinning"]
    memory.free(buffer)
    memory.close()  # unpins nothing that was not pinned
