import os
import threading

import numpy as np
import pytest

from lohan.errors import DoesNotFit, ScheduleError
from lohan.ssd import BufferPool

PAGE = 4096


def test_buffers_are_aligned_and_of_the_exact_size() -> None:
    pool = BufferPool(name="p", slot_bytes=3 * PAGE + 1, num_slots=3)
    buffers = [pool.lease() for _ in range(3)]
    assert all(buffer.address % PAGE == 0 for buffer in buffers)
    assert all(buffer.nbytes == 3 * PAGE + 1 for buffer in buffers)
    assert pool.reserved_bytes == 3 * 4 * PAGE
    single = pool.allocate(5 * 2**20 + 7)
    assert (single.nbytes, single.address % PAGE) == (5 * 2**20 + 7, 0)
    for buffer in [*buffers, single]:
        pool.take_back(buffer)
    pool.close()


def test_slots_do_not_overlap() -> None:
    pool = BufferPool(name="p", slot_bytes=PAGE + 5, num_slots=5, region_bytes=4 * PAGE)
    buffers = [pool.lease() for _ in range(5)]
    for n, buffer in enumerate(buffers):
        buffer.array()[:] = n
    assert [set(buffer.array().tolist()) for buffer in buffers] == [{n} for n in range(5)]
    assert len(pool.regions) == 3
    assert all(address % PAGE == 0 and nbytes <= 4 * PAGE for address, nbytes in pool.regions)
    for buffer in buffers:
        pool.take_back(buffer)
    pool.close()


def test_a_lease_that_is_not_there_is_a_mistake_of_the_schedule_not_a_wait() -> None:
    pool = BufferPool(name="weights", slot_bytes=PAGE, num_slots=1)
    with pool.lease(), pytest.raises(ScheduleError, match="all 1 slots of pool 'weights'"):
        pool.lease()
    with pool.lease():
        pass
    pool.close()


def test_views_are_writable_and_share_the_memory() -> None:
    pool = BufferPool(name="p", slot_bytes=PAGE, num_slots=1)
    with pool.lease(nbytes=16) as buffer:
        buffer.array(np.float32)[:] = 1.5
        assert bytes(buffer.view) == np.full(4, 1.5, dtype=np.float32).tobytes()
        assert buffer.nbytes == 16
    pool.close()


def test_a_view_of_a_single_buffer_outlives_it_safely() -> None:
    pool = BufferPool(name="p", slot_bytes=PAGE, num_slots=0)
    buffer = pool.allocate(2 * PAGE)
    array = buffer.array()
    array[:] = 3
    pool.take_back(buffer)
    pool.close()
    assert int(array.sum()) == 3 * 2 * PAGE


def test_use_after_return_is_an_error() -> None:
    pool = BufferPool(name="p", slot_bytes=PAGE, num_slots=1)
    buffer = pool.lease()
    pool.take_back(buffer)
    with pytest.raises(ScheduleError, match="after it was taken back"):
        _ = buffer.address
    with pytest.raises(ScheduleError, match="after it was taken back"):
        _ = buffer.view
    with pytest.raises(ScheduleError, match="after it was taken back"):
        buffer.array()
    pool.close()


def test_returning_twice_or_elsewhere_is_an_error() -> None:
    pool = BufferPool(name="p", slot_bytes=PAGE, num_slots=2)
    other = BufferPool(name="other", slot_bytes=PAGE, num_slots=1)
    buffer = pool.lease()
    with pytest.raises(ScheduleError, match="not leased from it"):
        other.take_back(buffer)
    pool.take_back(buffer)
    with pytest.raises(ScheduleError, match="taken back before"):
        pool.take_back(buffer)
    pool.close()
    other.close()


def test_closing_with_buffers_out_is_a_leak_and_an_error() -> None:
    pool = BufferPool(name="p", slot_bytes=PAGE, num_slots=2)
    buffer = pool.lease()
    with pytest.raises(ScheduleError, match="closed with 1 buffers out"):
        pool.close()
    buffer.array()[:] = 1
    pool.take_back(buffer)
    pool.close()
    pool.close()
    with pytest.raises(ScheduleError, match="after it was closed"):
        pool.lease()
    with pytest.raises(ScheduleError, match="after it was closed"):
        pool.allocate(PAGE)


def test_bytes_in_use_and_peak_are_counted() -> None:
    pool = BufferPool(name="p", slot_bytes=PAGE, num_slots=2)
    first, second = pool.lease(), pool.allocate(10)
    assert (pool.in_use_bytes, pool.peak_bytes) == (PAGE + 10, PAGE + 10)
    pool.take_back(second)
    pool.take_back(first)
    assert (pool.in_use_bytes, pool.peak_bytes) == (0, PAGE + 10)
    pool.close()


@pytest.mark.parametrize("nbytes", [0, -1, PAGE + 1])
def test_a_lease_fits_its_slot(nbytes: int) -> None:
    pool = BufferPool(name="p", slot_bytes=PAGE, num_slots=1)
    with pytest.raises(ScheduleError, match="its slots have 4096 bytes"):
        pool.lease(nbytes)
    with pytest.raises(ScheduleError, match="a buffer of 0 bytes was asked"):
        pool.allocate(0)
    pool.close()


def test_impossible_pools_are_refused() -> None:
    for slot_bytes, num_slots in ((0, 1), (-1, 1), (PAGE, -1)):
        with pytest.raises(ScheduleError, match="slots of"):
            BufferPool(name="p", slot_bytes=slot_bytes, num_slots=num_slots)
    with pytest.raises(DoesNotFit, match="could not get"):
        BufferPool(name="p", slot_bytes=2**50, num_slots=1)


def test_memory_is_given_back_to_the_system() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    for _ in range(20):
        pool = BufferPool(name="p", slot_bytes=2**20, num_slots=16)
        with pool.allocate(8 * 2**20):
            pass
        pool.close()
    assert resident() - before < 16 * 2**20


def test_threads_never_get_the_same_slot() -> None:
    pool = BufferPool(name="p", slot_bytes=PAGE, num_slots=8)
    mistakes: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            with pool.lease() as buffer:
                array = buffer.array()
                array[:] = number
                if not (array == number).all():
                    mistakes.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mistakes == []
    pool.close()
