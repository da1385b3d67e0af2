"""Swapped outputs: to SSD and back, room used again, budget kept."""

import os
import pathlib

import numpy as np
import pytest

from lohan.errors import Corrupt, OutOfSpace, ScheduleError, StorageError
from lohan.ssd import BufferPool, IoEngine, RunDirectories
from lohan.store import SwapFile, SwapKey
from lohan.vocabulary import BlockId
from support.fault_engine import Damage, Fail, FaultEngine
from support.ssd_engines import random_bytes
from support.state_stores import make_directories

SIZES = (1, 4096, 5000, 40_000)


def key(step: int, number: int) -> SwapKey:
    return SwapKey(step=step, micro_batch=0, block=BlockId(1), operator=number)


@pytest.fixture
def place(tmp_path: pathlib.Path):
    engine = FaultEngine(IoEngine(is_uring=False))
    run = RunDirectories.create(make_directories(tmp_path, 3), "a")
    yield run, engine, BufferPool("test")
    run.close()
    engine.close()


def test_outputs_come_back_and_their_room_is_used_again_every_step(place) -> None:
    run, engine, pool = place
    store = SwapFile(run, engine=engine, capacity_bytes=64 << 10, chunk_bytes=8192)
    for step in range(20):
        for number, nbytes in enumerate(SIZES):
            buffer = pool.allocate(nbytes)
            buffer.array()[:nbytes] = random_bytes(nbytes, seed=step + number)
            store.start_put(key(step, number), buffer, nbytes).wait()
            pool.take_back(buffer)
        for number, nbytes in reversed(list(enumerate(SIZES))):
            buffer = pool.allocate(nbytes)
            ticket = store.start_get(key(step, number), buffer)
            ticket.wait()
            assert ticket.is_done()
            found = ticket.tensor().numpy()
            assert np.array_equal(found, random_bytes(nbytes, seed=step + number))
            pool.take_back(buffer)
        for number in range(len(SIZES)):
            store.drop(key(step, number))
    assert store.counters.read_bytes == store.counters.verified_bytes > 0
    store.close()
    store.close()
    assert [os.listdir(path) for path in run.paths] == [["lock"]] * 3


def test_keys_and_room_are_checked(place) -> None:
    run, engine, pool = place
    store = SwapFile(run, engine=engine, capacity_bytes=8192, chunk_bytes=4096)
    buffer = pool.allocate(8192)
    with pytest.raises(ScheduleError, match="never put, or was dropped"):
        store.start_get(key(0, 7), buffer)
    with pytest.raises(ScheduleError, match="page boundary"):
        store.start_put(key(0, 1), buffer, 8193)
    store.start_put(key(0, 1), buffer, 5000).wait()
    with pytest.raises(ScheduleError, match=r"output 1 of block 1 \(micro-batch 0, step 0\)"):
        store.start_put(key(0, 1), buffer, 1)
    with pytest.raises(OutOfSpace):
        store.start_put(key(0, 2), buffer, 1)
    small = pool.allocate(4096)
    with pytest.raises(ScheduleError, match="page boundary"):
        store.start_get(key(0, 1), small)
    store.close()


def test_a_failed_put_and_a_damaged_get_name_the_output(place) -> None:
    run, engine, pool = place
    store = SwapFile(run, engine=engine, capacity_bytes=8192)
    buffer = pool.allocate(4096)
    engine.faults = {1: Fail(errno=5), 3: Damage()}
    with pytest.raises(StorageError, match="output 1 of block 1"):
        store.start_put(key(0, 1), buffer, 4096).wait()
    store.drop(key(0, 1))
    store.start_put(key(0, 1), buffer, 4096).wait()
    with pytest.raises(Corrupt, match="output 1 of block 1"):
        store.start_get(key(0, 1), buffer).wait()
    store.close()
