import os
import threading

import numpy as np
import pytest

from lohan.errors import DoesNotFit, ScheduleError
from lohan.ssd import BufferPool

PAGE = 4096


def test_buffers_are_aligned_and_of_the_exact_size() -> None:
    pool = BufferPool("p")
    buffers = [pool.allocate(3 * PAGE + 1) for _ in range(3)]
    assert all(buffer.address % PAGE == 0 for buffer in buffers)
    assert all(buffer.nbytes == 3 * PAGE + 1 for buffer in buffers)
    single = pool.allocate(5 * 2**20 + 7)
    assert (single.nbytes, single.address % PAGE) == (5 * 2**20 + 7, 0)
    for buffer in [*buffers, single]:
        pool.take_back(buffer)
    pool.close()


def test_buffers_do_not_overlap() -> None:
    pool = BufferPool("p")
    buffers = [pool.allocate(PAGE + 5) for _ in range(5)]
    for n, buffer in enumerate(buffers):
        buffer.array()[:] = n
    assert [set(buffer.array().tolist()) for buffer in buffers] == [{n} for n in range(5)]
    for buffer in buffers:
        pool.take_back(buffer)
    pool.close()


def test_views_are_writable_and_share_the_memory() -> None:
    pool = BufferPool("p")
    with pool.allocate(16) as buffer:
        buffer.array(np.float32)[:] = 1.5
        assert bytes(buffer.view) == np.full(4, 1.5, dtype=np.float32).tobytes()
        assert buffer.nbytes == 16
    pool.close()


def test_a_view_of_a_single_buffer_outlives_it_safely() -> None:
    pool = BufferPool("p")
    buffer = pool.allocate(2 * PAGE)
    array = buffer.array()
    array[:] = 3
    pool.take_back(buffer)
    pool.close()
    assert int(array.sum()) == 3 * 2 * PAGE


def test_use_after_return_is_an_error() -> None:
    pool = BufferPool("p")
    buffer = pool.allocate(PAGE)
    pool.take_back(buffer)
    with pytest.raises(ScheduleError, match="after it was taken back"):
        _ = buffer.address
    with pytest.raises(ScheduleError, match="after it was taken back"):
        _ = buffer.view
    with pytest.raises(ScheduleError, match="after it was taken back"):
        buffer.array()
    pool.close()


def test_returning_twice_or_elsewhere_is_an_error() -> None:
    pool = BufferPool("p")
    other = BufferPool("other")
    buffer = pool.allocate(PAGE)
    with pytest.raises(ScheduleError, match="not leased from it"):
        other.take_back(buffer)
    pool.take_back(buffer)
    with pytest.raises(ScheduleError, match="taken back before"):
        pool.take_back(buffer)
    pool.close()
    other.close()


def test_closing_with_buffers_out_is_a_leak_and_an_error() -> None:
    pool = BufferPool("p")
    buffer = pool.allocate(PAGE)
    with pytest.raises(ScheduleError, match="closed with 1 buffers out"):
        pool.close()
    buffer.array()[:] = 1
    pool.take_back(buffer)
    pool.close()
    pool.close()
    with pytest.raises(ScheduleError, match="after it was closed"):
        pool.allocate(PAGE)


def test_bytes_in_use_and_peak_are_counted() -> None:
    pool = BufferPool("p")
    first, second = pool.allocate(PAGE), pool.allocate(10)
    assert (pool.in_use_bytes, pool.peak_bytes) == (PAGE + 10, PAGE + 10)
    pool.take_back(second)
    pool.take_back(first)
    assert (pool.in_use_bytes, pool.peak_bytes) == (0, PAGE + 10)
    pool.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_impossible_buffers_are_refused(nbytes: int) -> None:
    pool = BufferPool("p")
    with pytest.raises(ScheduleError, match=f"a buffer of {nbytes} bytes was asked"):
        pool.allocate(nbytes)
    with pytest.raises(DoesNotFit, match="could not get"):
        pool.allocate(2**50)
    pool.close()


def test_memory_is_given_back_to_the_system() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    for _ in range(20):
        pool = BufferPool("p")
        with pool.allocate(8 * 2**20):
            pass
        pool.close()
    assert resident() - before < 16 * 2**20


def test_threads_never_get_the_same_buffer() -> None:
    pool = BufferPool("p")
    mistakes: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            with pool.allocate(PAGE) as buffer:
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
