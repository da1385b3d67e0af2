"""The state store's memory and traffic: resident parts, budgets, scratch, bytes moved."""

import pathlib

import numpy as np
import pytest
import torch

from lohan.errors import ConfigError, DoesNotFit, ScheduleError
from lohan.ssd import BufferPool, IoEngine, RunDirectories
from lohan.store import (
    GRAIN,
    MIN_SCRATCH_BYTES,
    Part,
    create_states,
    parts_of_kinds,
    resident_bytes,
)
from lohan.vocabulary import BlockId, TensorKind
from support.state_stores import (
    RUN_ID,
    MirrorStates,
    contents,
    created,
    make_directories,
    opened,
    random_tensors,
    small_layout,
    update,
    update_all,
)

SOME_RESIDENT = {BlockId(0): [Part.P16], BlockId(1): [Part.P16, Part.M32, Part.FROZEN16]}
B0, B1, HEAD = BlockId(0), BlockId(1), BlockId(2)


@pytest.fixture
def engine():
    engine = IoEngine(is_uring=False)
    yield engine
    engine.close()


def test_resident_parts_are_used_in_place_and_cause_no_traffic(tmp_path, engine) -> None:
    directories = make_directories(tmp_path, 1)
    layout = small_layout()
    everything = {BlockId(n): layout.blocks[n].parts for n in range(len(layout.blocks))}
    with created(directories, layout, engine, everything) as store:
        store.fill(random_tensors(layout).items())
        update_all(store, 1)
        ticket = store.start_read(B0, Part.M32, 0, GRAIN)
        assert ticket.striped is None
        assert ticket.is_done()
        assert ticket.tensor().dtype is torch.float32
        assert store.counters.written_bytes == store.counters.read_bytes == 0
        # Memory of the caller's is copied into the part.
        pool = BufferPool("test")
        store.begin_update(B0)
        with pool.allocate(4 * GRAIN) as buffer:
            for part in layout.blocks[0].trainable_parts:
                for begin, end in layout.blocks[0].chunks(GRAIN):
                    buffer.array()[:] = 7
                    store.start_write(B0, part, begin, end, buffer).wait()
        store.finish_update(B0)
        pool.close()
        assert (ticket.tensor().view(torch.uint8) == 7).all()
        due_bytes = store.due_bytes
        store.seal(step=1)
        assert store.counters.written_bytes == layout.slot_bytes() + layout.frozen_bytes()
        assert store.counters.written_bytes == due_bytes
        assert store.due_bytes == 0
        mirror = MirrorStates(contents(store))
        update(store, B1, 2)
        store.seal(step=2)
        changed = sum(
            layout.blocks[1].part_bytes(part) for part in layout.blocks[1].trainable_parts
        )
        assert store.counters.written_bytes == (
            layout.slot_bytes() + layout.frozen_bytes() + changed
        )
    with opened(directories, engine) as store:
        found = contents(store)
        assert np.array_equal(found[0, Part.M32], mirror.parts[0, Part.M32])


def test_ram_beyond_the_budget_is_refused_before_anything_is_made(tmp_path, engine) -> None:
    directories = make_directories(tmp_path, 1)
    layout = small_layout()
    needed = resident_bytes(layout, SOME_RESIDENT) + MIN_SCRATCH_BYTES
    run = RunDirectories.create(directories, RUN_ID)
    with pytest.raises(DoesNotFit, match="keep fewer parts in RAM"):
        create_states(
            run,
            layout,
            engine=engine,
            resident_parts=SOME_RESIDENT,
            scratch_bytes=MIN_SCRATCH_BYTES,
            ram_budget_bytes=needed - 1,
        )
    run.close(should_delete=True)
    assert list(directories[0].iterdir()) == []
    with created(directories, layout, engine, SOME_RESIDENT, ram_budget_bytes=needed) as store:
        store.fill(random_tensors(layout).items())
        update_all(store, 1)
        store.seal(step=1)
        store.verify()
        assert store.ram_peak_bytes == needed
        assert store._residents._pool.in_use_bytes == needed - MIN_SCRATCH_BYTES


def test_parts_a_block_does_not_have_cannot_be_resident(tmp_path, engine) -> None:
    run = RunDirectories.create(make_directories(tmp_path, 1), RUN_ID)
    layout = small_layout()
    with pytest.raises(ConfigError, match="P32 of block 0"):
        create_states(run, layout, engine=engine, resident_parts={B0: [Part.P32]})
    with pytest.raises(ConfigError, match="scratch memory of 1 bytes"):
        create_states(run, layout, engine=engine, scratch_bytes=1)
    run.close(should_delete=True)


def test_plans_name_kinds_and_the_store_parts() -> None:
    layout = small_layout()
    kinds = [{TensorKind.P16}, {TensorKind.P16, TensorKind.P32}, {TensorKind.OS32}]
    assert parts_of_kinds(layout, kinds) == {
        B0: (Part.P16,),
        B1: (Part.P16, Part.LO16, Part.FROZEN16),
        HEAD: (),
    }


def test_what_to_pin_is_every_resident_part(tmp_path: pathlib.Path, engine) -> None:
    layout = small_layout()
    with created(make_directories(tmp_path, 1), layout, engine, SOME_RESIDENT) as store:
        sizes = [nbytes for _, nbytes in store.resident_regions]
        assert sum(sizes) == resident_bytes(layout, SOME_RESIDENT)
        assert len(sizes) == 4


def test_scratch_memory_has_one_user_at_a_time(tmp_path: pathlib.Path, engine) -> None:
    layout = small_layout()
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        store.fill(random_tensors(layout).items())
        masters = store.masters()
        next(masters)
        with pytest.raises(ScheduleError, match="take turns"):
            store.verify()
        masters.close()
        store.verify()


def test_bytes_read_and_written_are_twelve_per_parameter(tmp_path: pathlib.Path, engine) -> None:
    layout = small_layout()
    with created(make_directories(tmp_path, 2), layout, engine) as store:
        store.fill(random_tensors(layout).items())
        store.seal(step=0)
        before = store.counters
        update_all(store, 1)
        after = store.counters
        assert after.read_bytes - before.read_bytes == layout.slot_bytes()
        assert after.written_bytes - before.written_bytes == layout.slot_bytes()
        read_bytes = after.read_bytes - before.read_bytes
        assert after.verified_bytes - before.verified_bytes <= read_bytes
        # Once written in chunks, chunks are verified too.
        update_all(store, 2)
        last = store.counters
        assert last.verified_bytes - after.verified_bytes == layout.slot_bytes()
