"""A block between seals: which calls may follow which, and on several threads."""

import concurrent.futures
import pathlib

import pytest
import torch

from lohan.errors import CheckpointError, ScheduleError
from lohan.ssd import BufferPool, IoEngine
from lohan.store import (
    GRAIN,
    BlockState,
    Part,
    StateLayout,
    TensorEntry,
)
from lohan.store.files.state_file import StateFile
from lohan.vocabulary import BlockId
from support.state_stores import (
    MirrorStates,
    contents,
    created,
    make_directories,
    opened,
    random_tensors,
    small_layout,
    update,
)

B0, B1, HEAD = BlockId(0), BlockId(1), BlockId(2)


@pytest.fixture
def engine():
    engine = IoEngine(is_uring=False)
    yield engine
    engine.close()


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
        pool = BufferPool("test")
        store.begin_update(B0)
        with pool.allocate(4 * GRAIN) as buffer:
            store.start_write(B0, Part.P16, 0, GRAIN, buffer).wait()
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
    pool = BufferPool("test")
    with (
        created(make_directories(tmp_path, 1), layout, engine) as store,
        pool.allocate(8 * GRAIN) as buffer,
    ):
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
        store.start_write(B1, Part.M32, 0, GRAIN, buffer).wait()
    pool.close()


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
        verify, flush = StateFile.verify, StateFile.flush

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
            verify(file, home, **memory)

        # With a seal in a slot of its own an update begins beside a verification.
        monkeypatch.setattr(StateFile, "verify", during_verification)
        store.verify()
        assert store.state_of(B0) is BlockState.UPDATING


def test_writes_belong_to_an_update_and_engines_that_are_closed_tear_it(tmp_path) -> None:
    layout = small_layout()
    engine = IoEngine(is_uring=False)
    pool = BufferPool("test")
    with (
        created(make_directories(tmp_path, 1), layout, engine) as store,
        pool.allocate(4 * GRAIN) as buffer,
    ):
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
