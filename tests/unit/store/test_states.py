"""The state store against plain bytes: reads, updates, seals, residents and what is refused."""

import concurrent.futures
import contextlib
import pathlib

import numpy as np
import pytest
import torch

from lohan.errors import CheckpointError, ConfigError, Corrupt, DoesNotFit, ScheduleError
from lohan.optimizer.masters import join_masters
from lohan.ssd import BufferPool, NativeEngine, RunDirectories
from lohan.store import (
    GRAIN,
    MIN_SCRATCH_BYTES,
    BlockState,
    Part,
    SlotCount,
    StateLayout,
    StateStoreWarning,
    TensorEntry,
    create_states,
    parts_of_kinds,
    resident_bytes,
)
from lohan.store.state_file import StateFile
from lohan.vocabulary import BlockId, TensorKind
from support.ssd_engines import NATIVE, make_engine, nothing_leaks
from support.state_stores import (
    RUN_ID,
    STATE_FORMATS,
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
    engine = NativeEngine(is_uring=False)
    yield engine
    engine.close()


@pytest.mark.parametrize("engine_name", NATIVE)
@pytest.mark.parametrize(("compute_format", "master_format"), STATE_FORMATS)
@pytest.mark.parametrize("resident_parts", [{}, SOME_RESIDENT], ids=["on SSD", "some in RAM"])
def test_updates_and_seals_give_the_bytes_of_the_judge(
    tmp_path: pathlib.Path, engine_name, compute_format, master_format, resident_parts
) -> None:
    directories = make_directories(tmp_path, 3)
    layout = small_layout(compute_format, master_format)
    random_tensors(layout)  # torch starts its threads here, not below
    with nothing_leaks(), contextlib.closing(make_engine(engine_name)) as engine:
        with created(directories, layout, engine, resident_parts) as store:
            store.fill(random_tensors(layout).items())
            mirror = MirrorStates(contents(store))
            for step in range(1, 6):
                update_all(store, step, num_positions=(1 + step % 2) * GRAIN)
                mirror.update_all(step)
                mirror.judge(contents(store))
                if step in (2, 5):
                    store.seal(step=step, metadata={"epoch": step})
                    store.verify()
        with opened(directories, engine) as store:
            assert store.sealed is not None
            assert (store.sealed.step, store.sealed.metadata) == (5, {"epoch": 5})
            mirror.judge(contents(store))
            update_all(store, 6)
            mirror.update_all(6)
            store.seal(step=6)
        # Residency may change from one opening to the next.
        with opened(directories, engine, {B0: [Part.V32], HEAD: [Part.FROZEN16]}) as store:
            mirror.judge(contents(store))


def test_what_is_not_sealed_is_gone_after_opening_again(tmp_path: pathlib.Path, engine) -> None:
    directories = make_directories(tmp_path, 2)
    layout = small_layout()
    with created(directories, layout, engine, SOME_RESIDENT) as store:
        store.fill(random_tensors(layout).items())
        store.seal(step=0)
        mirror = MirrorStates(contents(store))
        update_all(store, 1)
        update_all(store, 2)
        store.verify()
    with opened(directories, engine, SOME_RESIDENT) as store:
        mirror.judge(contents(store))
        assert {store.state_of(BlockId(n)) for n in layout.block_ids} == {BlockState.SEALED}


def test_states_of_a_block_follow_the_rules(tmp_path: pathlib.Path, engine) -> None:
    layout = small_layout()
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        assert store.state_of(B0) is BlockState.EMPTY
        with pytest.raises(ScheduleError, match="nothing was written yet"):
            contents(store)
        with pytest.raises(ScheduleError, match="an update follows a fill"):
            store.begin_update(B0)
        with pytest.raises(CheckpointError, match="never filled"):
            store.seal(step=0)
        store.fill(random_tensors(layout).items())
        assert store.state_of(B0) is BlockState.AHEAD
        with pytest.raises(ScheduleError, match="first thing"):
            store.fill([])
        store.seal(step=0)
        assert store.state_of(B0) is BlockState.SEALED
        with pytest.raises(ScheduleError, match="frozen"):
            store.begin_update(HEAD)
        with pytest.raises(ScheduleError, match="none had begun"):
            store.finish_update(B0)
        store.begin_update(B0)
        with pytest.raises(ScheduleError, match="an update follows"):
            store.begin_update(B0)
        with pytest.raises(ScheduleError, match="its update has not ended"):
            store.seal(step=1)


def test_an_update_that_leaves_a_range_out_tears_the_block(tmp_path, engine) -> None:
    directories = make_directories(tmp_path, 1)
    layout = small_layout()
    with created(directories, layout, engine) as store:
        store.fill(random_tensors(layout).items())
        store.seal(step=0)
        mirror = MirrorStates(contents(store))
        pool = BufferPool(name="test", slot_bytes=4 * GRAIN, num_slots=1)
        store.begin_update(B0)
        with pool.lease() as buffer:
            store.wait(store.start_write(B0, Part.P16, 0, GRAIN, buffer))
            with pytest.raises(ScheduleError, match="written twice"):
                store.start_write(B0, Part.P16, 0, GRAIN, buffer)
            with pytest.raises(ScheduleError, match="was written by the update"):
                store.start_read(B0, Part.P16, 0, GRAIN, buffer)
        with pytest.raises(ScheduleError, match=r"without positions \[2048, 2336\) of P16"):
            store.finish_update(B0)
        assert store.state_of(B0) is BlockState.TORN
        for use in (
            lambda: store.seal(step=1),
            lambda: store.begin_update(B0),
            lambda: contents(store),
        ):
            with pytest.raises(CheckpointError, match="mix of two steps"):
                use()
        pool.close()
    with opened(directories, engine) as store:
        mirror.judge(contents(store))


def test_frozen_parts_and_wrong_ranges_are_refused(tmp_path: pathlib.Path, engine) -> None:
    layout = small_layout()
    pool = BufferPool(name="test", slot_bytes=8 * GRAIN, num_slots=1)
    with created(make_directories(tmp_path, 1), layout, engine) as store, pool.lease() as buffer:
        store.fill(random_tensors(layout).items())
        store.begin_update(B1)
        with pytest.raises(ScheduleError, match="frozen parameters do not change"):
            store.start_write(B1, Part.FROZEN16, 0, GRAIN, buffer)
        for begin, end in [(0, 0), (1, GRAIN), (0, GRAIN + 1), (-GRAIN, GRAIN), (0, 10**6)]:
            with pytest.raises(ScheduleError, match="multiples of 2048"):
                store.start_read(B1, Part.P16, begin, end, buffer)
        with pytest.raises(ScheduleError, match=r"P32 of block layers\.0"):
            store.start_read(B1, Part.P32, 0, GRAIN, buffer)
        with pytest.raises(ScheduleError, match="has 3 blocks"):
            store.start_read(BlockId(3), Part.P16, 0, GRAIN, buffer)
        with pytest.raises(ScheduleError, match="without memory"):
            store.start_read(B1, Part.P16, 0, GRAIN)
        for offset_bytes in (1, -4096, 8 * GRAIN):
            with pytest.raises(ScheduleError, match="page boundary"):
                store.start_read(B1, Part.M32, 0, GRAIN, buffer, offset_bytes=offset_bytes)
            with pytest.raises(ScheduleError, match="page boundary"):
                store.start_write(B1, Part.M32, 0, GRAIN, buffer, offset_bytes=offset_bytes)
        # A refused write is not part of the update: the range can still be written.
        store.wait(store.start_write(B1, Part.M32, 0, GRAIN, buffer))
    pool.close()


def test_resident_parts_are_used_in_place_and_cause_no_traffic(tmp_path, engine) -> None:
    directories = make_directories(tmp_path, 1)
    layout = small_layout()
    everything = {BlockId(n): layout.blocks[n].parts for n in layout.block_ids}
    with created(directories, layout, engine, everything) as store:
        store.fill(random_tensors(layout).items())
        update_all(store, 1)
        ticket = store.start_read(B0, Part.M32, 0, GRAIN)
        assert ticket.is_in_ram
        assert store.is_done(ticket)
        assert ticket.tensor().dtype is torch.float32
        assert store.counters.written_bytes == store.counters.read_bytes == 0
        # Memory of the caller's is copied into the part.
        pool = BufferPool(name="test", slot_bytes=4 * GRAIN, num_slots=1)
        store.begin_update(B0)
        with pool.lease() as buffer:
            for part in layout.blocks[0].trainable_parts:
                for begin, end in layout.blocks[0].chunks(GRAIN):
                    buffer.array()[:] = 7
                    store.wait(store.start_write(B0, part, begin, end, buffer))
        store.finish_update(B0)
        pool.close()
        assert (ticket.tensor().view(torch.uint8) == 7).all()
        store.seal(step=1)
        assert store.counters.written_bytes == layout.slot_bytes() + layout.frozen_bytes()
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
        assert store.ram_held_bytes == needed - MIN_SCRATCH_BYTES


def test_parts_a_block_does_not_have_cannot_be_resident(tmp_path, engine) -> None:
    run = RunDirectories.create(make_directories(tmp_path, 1), RUN_ID)
    layout = small_layout()
    with pytest.raises(ConfigError, match="P32 of block 0"):
        create_states(run, layout, engine=engine, resident_parts={B0: [Part.P32]})
    with pytest.raises(ConfigError, match="scratch memory of 1 bytes"):
        create_states(run, layout, engine=engine, scratch_bytes=1)
    run.close(should_delete=True)


def test_one_slot_warns_and_finds_an_interrupted_update(tmp_path: pathlib.Path, engine) -> None:
    directories = make_directories(tmp_path, 2)
    layout = small_layout()
    run = RunDirectories.create(directories, RUN_ID)
    with pytest.warns(StateStoreWarning, match="cannot be resumed"):
        store = create_states(run, layout, engine=engine, slot_count=SlotCount.ONE)
    store.fill(random_tensors(layout).items())
    store.seal(step=0)
    update_all(store, 1)
    store.seal(step=1)
    mirror = MirrorStates(contents(store))
    store.close()
    run.close()
    with opened(directories, engine) as store:
        mirror.judge(contents(store))
        update(store, B0, 2)
        store.verify()
    with (
        pytest.raises(Corrupt, match="keeps one slot per block") as caught,
        opened(directories, engine),
    ):
        pass
    assert "block 0 (embedding)" in str(caught.value)
    assert caught.value.path is not None


def test_two_slots_take_twice_the_space_and_frozen_parts_once(tmp_path, engine) -> None:
    layout = small_layout()
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        wanted = 2 * layout.slot_bytes() + layout.frozen_bytes()
        size = pathlib.Path(store.paths[0]).stat().st_size
        assert wanted <= size < wanted + 4 * 4096


def test_metadata_that_is_not_json_is_refused_and_the_seal_can_be_tried_again(
    tmp_path, engine
) -> None:
    layout = small_layout()
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        store.fill(random_tensors(layout).items())
        for metadata in ({"a": float("nan")}, {"a": object()}, {1: 2}, {"a": (1, 2)}):
            with pytest.raises(ConfigError, match="metadata"):
                store.seal(step=0, metadata=metadata)
        store.seal(step=0, metadata={"a": [1, None, "\u00fc", {"b": 1.5}]})
        assert store.sealed is not None
        assert store.sealed.metadata["a"][2] == "\u00fc"


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


def test_deleting_a_store_leaves_no_file(tmp_path: pathlib.Path, engine) -> None:
    directories = make_directories(tmp_path, 2)
    layout = small_layout()
    with created(directories, layout, engine) as store:
        store.fill(random_tensors(layout).items())
        store.seal(step=0)
        store.close(should_delete=True)
        store.close(should_delete=True)
    for directory in directories:
        assert [path.name for path in (directory / f"lohan-{RUN_ID}").iterdir()] == ["lock"]


def test_the_split_parts_are_those_of_the_optimizer(tmp_path: pathlib.Path, engine) -> None:
    layout = small_layout()
    tensors = random_tensors(layout)
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        store.fill(tensors.items())
        found = {key: torch.from_numpy(value) for key, value in contents(store).items()}
    joined = torch.empty(layout.blocks[0].num_trainable)
    join_masters(
        p16=found[0, Part.P16].view(torch.bfloat16),
        lo16=found[0, Part.LO16].view(torch.int16),
        v32=found[0, Part.V32].view(torch.float32),
        p32=joined,
    )
    assert torch.equal(joined[: 70 * 33].view(70, 33), tensors["embed"])
    assert torch.equal(
        found[0, Part.P16].view(torch.bfloat16)[: 70 * 33], tensors["embed"].bfloat16().view(-1)
    )


def test_blocks_are_updated_by_several_threads_beside_a_verification(
    tmp_path: pathlib.Path, engine
) -> None:
    layout = StateLayout.pack(
        {f"b{n}": (TensorEntry(name=f"w{n}", shape=(n + 1, 3000)),) for n in range(4)}
    )
    directories = make_directories(tmp_path, 2)
    with created(directories, layout, engine, {BlockId(2): [Part.M32]}) as store:
        store.fill(random_tensors(layout).items())
        mirror = MirrorStates(contents(store))
        with concurrent.futures.ThreadPoolExecutor(5) as threads:
            for step in range(1, 6):
                done = [threads.submit(update, store, BlockId(n), step) for n in range(4)]
                if step > 1:
                    done.append(threads.submit(store.verify))
                for future in done:
                    future.result()
                mirror.update_all(step)
                store.seal(step=step)
        mirror.judge(contents(store))
    with opened(directories, engine) as store:
        mirror.judge(contents(store))


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


def test_an_update_cannot_end_or_be_sealed_while_a_write_of_it_is_being_started(
    tmp_path: pathlib.Path, engine
) -> None:
    layout = StateLayout.pack({"b": (TensorEntry(name="w", shape=(32,)),)})
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        store.fill(random_tensors(layout).items())
        books = store._slots[B0]
        store.begin_update(B0)
        for part in layout.blocks[0].trainable_parts:
            books.enter_write(part, 0, 32)
        with pytest.raises(ScheduleError, match="still starting a write"):
            store.finish_update(B0)


def test_a_seal_and_a_verification_take_turns_and_bar_updates_that_would_mix(
    tmp_path: pathlib.Path, engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = small_layout()
    with created(make_directories(tmp_path, 1), layout, engine) as store:
        store.fill(random_tensors(layout).items())
        refusals = []
        verify_extent, flush = StateFile.verify, StateFile.flush

        def attempt() -> None:
            for call in (store.verify, lambda: store.seal(step=1), lambda: store.begin_update(B0)):
                try:
                    call()
                except ScheduleError as error:
                    refusals.append(error.what)

        def during_flush(file: StateFile) -> None:
            attempt()
            flush(file)

        monkeypatch.setattr(StateFile, "flush", during_flush)
        store.seal(step=0)
        assert refusals == [
            "a verification began during a seal",
            "a seal began during a seal",
            "an update of block 0 began during a seal",
        ]
        refusals.clear()

        def during_verification(file: StateFile, home, **memory) -> None:
            if not refusals:
                attempt()
                assert refusals == [
                    "a verification began during a verification",
                    "a seal began during a verification",
                ]
            verify_extent(file, home, **memory)

        # With a seal in a slot of its own an update begins beside a verification.
        monkeypatch.setattr(StateFile, "verify", during_verification)
        store.verify()
        assert store.state_of(B0) is BlockState.UPDATING


def test_where_warnings_are_errors_one_slot_leaves_nothing_behind(tmp_path, engine) -> None:
    directories = make_directories(tmp_path, 1)
    run = RunDirectories.create(directories, RUN_ID)
    with pytest.raises(StateStoreWarning):
        create_states(run, small_layout(), engine=engine, slot_count=SlotCount.ONE)
    run.close(should_delete=True)
    assert list(directories[0].iterdir()) == []


def test_writes_belong_to_an_update_and_engines_that_are_closed_tear_it(tmp_path) -> None:
    layout = small_layout()
    engine = NativeEngine(is_uring=False)
    pool = BufferPool(name="test", slot_bytes=4 * GRAIN, num_slots=1)
    with created(make_directories(tmp_path, 1), layout, engine) as store, pool.lease() as buffer:
        store.fill(random_tensors(layout).items())
        assert store.dtype_of(Part.P16) is torch.bfloat16
        with pytest.raises(ScheduleError, match="between begin_update and its end"):
            store.start_write(B0, Part.P16, 0, GRAIN, buffer)
        store.begin_update(B0)
        engine.close()
        with pytest.raises(ScheduleError, match="engine was given a request"):
            store.start_write(B0, Part.P16, 0, GRAIN, buffer)
        assert store.state_of(B0) is BlockState.TORN
    pool.close()
