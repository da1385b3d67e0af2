"""Gradients that wait in RAM and on SSD."""

import errno
import os
import pathlib

import numpy as np
import pytest
import torch

from lohan.errors import Corrupt, OutOfSpace, ScheduleError, StorageError
from lohan.ssd import BufferPool, MemoryEngine, NativeEngine, RunDirectories
from lohan.store import GRAIN, GradientStore
from lohan.vocabulary import BlockId
from support.fault_engine import Damage, Fail, FaultEngine
from support.ssd_engines import nothing_leaks, random_bytes
from support.state_stores import make_directories

LENGTHS = {BlockId(0): 3 * GRAIN, BlockId(1): GRAIN + 100, BlockId(2): 64}


@pytest.fixture
def place(tmp_path: pathlib.Path):
    engine = NativeEngine(is_uring=False)
    run = RunDirectories.create(make_directories(tmp_path, 2), "g")
    yield run, engine
    run.close()
    engine.close()


def put(store: GradientStore, block: BlockId) -> np.ndarray:
    values = random_bytes(store.gradient_bytes(block), seed=block)
    store.lease(block).array()[:] = values
    return values


def test_gradients_come_back_from_ram_and_from_ssd(place) -> None:
    run, engine = place
    store = GradientStore(
        run, LENGTHS, engine=engine, num_ram_slots=2, spill_bytes=32 << 10, chunk_bytes=8192
    )
    pool = BufferPool(name="test", slot_bytes=2 * GRAIN, num_slots=1)
    with nothing_leaks():
        for _ in range(3):
            values = {}
            for block in LENGTHS:
                values[block] = put(store, block)
                if block < 2:
                    ticket = store.start_spill(block)
                    store.wait(ticket)
                    store.wait(ticket)
            for block, length in LENGTHS.items():
                for begin in range(0, length, GRAIN):
                    end = min(begin + GRAIN, length)
                    with pool.lease() as buffer:
                        ticket = store.start_read(block, begin, end, buffer)
                        store.wait(ticket)
                        assert store.is_done(ticket)
                        found = ticket.tensor().view(torch.uint8).numpy()
                        assert np.array_equal(found, values[block][2 * begin : 2 * end])
                    assert ticket.is_in_ram == (block == 2)
                store.drop(block)
    assert store.counters.written_bytes == 3 * (12288 + 8192)
    assert store.ram_held_bytes >= 2 * 12288
    paths = [os.path.join(path, name) for path in run.paths for name in os.listdir(path)]
    assert any("gradients" in path for path in paths)
    store.close()
    store.close()
    assert [os.listdir(path) for path in run.paths] == [["lock"], ["lock"]]
    pool.close()


def test_the_order_of_calls_is_checked(place) -> None:
    run, engine = place
    store = GradientStore(run, LENGTHS, engine=engine, num_ram_slots=1, spill_bytes=4096)
    block = BlockId(2)
    with pytest.raises(ScheduleError, match="none waits"):
        store.drop(block)
    put(store, block)
    with pytest.raises(ScheduleError, match="was not dropped"):
        store.lease(block)
    with pytest.raises(ScheduleError, match="all 1 slots"):
        store.lease(BlockId(1))
    for begin, end in ((0, 32), (1, 64), (0, 0), (0, 65)):
        with pytest.raises(ScheduleError, match="multiples of 2048"):
            store.start_read(block, begin, end)
    store.wait(store.start_spill(block))
    with pytest.raises(ScheduleError, match="it has left RAM"):
        store.start_spill(block)
    with pytest.raises(ScheduleError, match="without memory"):
        store.start_read(block, 0, 64)
    store.close()


def test_room_beyond_what_was_reserved_is_refused_and_the_gradient_stays(place) -> None:
    run, engine = place
    store = GradientStore(
        run,
        {BlockId(0): 4 * GRAIN},
        engine=engine,
        num_ram_slots=1,
        spill_bytes=1,
        chunk_bytes=4096,
    )
    values = put(store, BlockId(0))
    with pytest.raises(OutOfSpace):
        store.start_spill(BlockId(0))
    ticket = store.start_read(BlockId(0), 0, GRAIN)
    assert np.array_equal(np.frombuffer(ticket.memory.view[:4096], np.uint8), values[:4096])
    store.close()


def test_without_room_on_ssd_nothing_is_made_there(place) -> None:
    run, engine = place
    store = GradientStore(run, LENGTHS, engine=engine, num_ram_slots=1)
    put(store, BlockId(0))
    with pytest.raises(ScheduleError, match="has no room"):
        store.start_spill(BlockId(0))
    assert os.listdir(run.paths[0]) == ["lock"]
    store.close()


def test_leftovers_of_a_killed_process_are_replaced(place) -> None:
    run, engine = place
    for path in run.paths:
        pathlib.Path(path, "gradients.0.bin").write_bytes(b"left over")
        pathlib.Path(path, "other.0.bin").write_bytes(b"not ours")
    store = GradientStore(run, LENGTHS, engine=engine, num_ram_slots=1, spill_bytes=4096)
    store.close()
    assert sorted(os.listdir(run.paths[1])) == ["lock", "other.0.bin"]


def test_a_failed_spill_keeps_the_gradient_in_ram(tmp_path: pathlib.Path) -> None:
    engine = FaultEngine(NativeEngine(is_uring=False), faults={1: Fail(errno=errno.EIO)})
    run = RunDirectories.create(make_directories(tmp_path, 1), "g")
    store = GradientStore(run, LENGTHS, engine=engine, num_ram_slots=1, spill_bytes=32 << 10)
    values = put(store, BlockId(0))
    with pytest.raises(StorageError, match="the gradient of block 0: a write failed"):
        store.wait(store.start_spill(BlockId(0)))
    assert store.start_read(BlockId(0), 0, GRAIN).is_in_ram
    ticket = store.start_spill(BlockId(0))
    with pytest.raises(ScheduleError, match="was not waited for"):
        store.drop(BlockId(0))
    store.wait(ticket)
    engine.faults = {engine.num_requests + 1: Damage()}
    pool = BufferPool(name="test", slot_bytes=6 * GRAIN, num_slots=1)
    with pool.lease() as buffer:
        with pytest.raises(Corrupt, match="of the gradient of block 0"):
            store.wait(store.start_read(BlockId(0), 0, 3 * GRAIN, buffer))
        store.wait(store.start_read(BlockId(0), 0, 3 * GRAIN, buffer))
        assert np.array_equal(buffer.array(), values)
    pool.close()
    store.close()
    run.close()
    engine.close()


def test_too_little_room_on_ssd_is_refused_and_nothing_is_held(tmp_path: pathlib.Path) -> None:
    run = RunDirectories.create(make_directories(tmp_path, 1), "g")
    engine = MemoryEngine(capacity_bytes=4096)
    with pytest.raises(OutOfSpace):
        GradientStore(run, LENGTHS, engine=engine, num_ram_slots=1, spill_bytes=1 << 20)
    store = GradientStore(run, LENGTHS, engine=engine, num_ram_slots=2)
    assert sum(nbytes for _, nbytes in store.ram_regions) == store.ram_held_bytes
    store.close()
    run.close()


def test_a_closed_engine_refuses_to_spill_and_the_gradient_stays(tmp_path: pathlib.Path) -> None:
    run = RunDirectories.create(make_directories(tmp_path, 1), "g")
    engine = NativeEngine(is_uring=False)
    store = GradientStore(run, LENGTHS, engine=engine, num_ram_slots=1, spill_bytes=1 << 20)
    put(store, BlockId(0))
    engine.close()
    with pytest.raises(ScheduleError, match="engine was given a request"):
        store.start_spill(BlockId(0))
    assert store.start_read(BlockId(0), 0, GRAIN).is_in_ram
    store.close()
    run.close()
