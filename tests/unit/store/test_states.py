"""The state store against plain bytes: what is updated and sealed is what is read; slots."""

import contextlib
import pathlib

import pytest
import torch

from lohan.errors import ConfigError, Corrupt
from lohan.ssd import IoEngine, RunDirectories
from lohan.store import (
    GRAIN,
    BlockState,
    Part,
    SlotCount,
    StateStoreWarning,
    create_states,
)
from lohan.vocabulary import BlockId
from support.optimizer_arrays import join_masters
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
B0, HEAD = BlockId(0), BlockId(2)


@pytest.fixture
def engine():
    engine = IoEngine(is_uring=False)
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
        assert {store.state_of(BlockId(n)) for n in range(len(layout.blocks))} == {
            BlockState.SEALED
        }


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


def test_where_warnings_are_errors_one_slot_leaves_nothing_behind(tmp_path, engine) -> None:
    directories = make_directories(tmp_path, 1)
    run = RunDirectories.create(directories, RUN_ID)
    with pytest.raises(StateStoreWarning):
        create_states(run, small_layout(), engine=engine, slot_count=SlotCount.ONE)
    run.close(should_delete=True)
    assert list(directories[0].iterdir()) == []
