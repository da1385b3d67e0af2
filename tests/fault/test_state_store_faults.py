"""Every request of a store's life goes wrong in turn: nothing sealed is lost, nothing leaks."""

import contextlib
import errno
import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest

from lohan.errors import (
    CheckpointError,
    Corrupt,
    OutOfSpace,
    ShortTransfer,
    StorageError,
)
from lohan.ssd import BufferPool, IoEngine, Operation, RunDirectories
from lohan.store import BlockState, CopiesInDoubt, Part, create_states
from lohan.vocabulary import BlockId
from support.fault_engine import Damage, Fail, Fault, FaultEngine, Shorten
from support.memory_engine import MemoryEngine
from support.power_cut import Countdown, PowerCut, VolatileEngine, counted_system_calls
from support.sealing_workload import LAYOUT, RESIDENT, Life
from support.ssd_engines import nothing_leaks
from support.state_stores import (
    RUN_ID,
    MirrorStates,
    contents,
    created,
    make_directories,
    opened,
    random_tensors,
    update_all,
)

FAULTS: dict[str, tuple[Fault, type[StorageError]]] = {
    "input/output error": (Fail(errno=errno.EIO), StorageError),
    "disk full": (Fail(errno=errno.ENOSPC), OutOfSpace),
    "short": (Shorten(), ShortTransfer),
    "damaged": (Damage(), Corrupt),
}


@pytest.fixture(scope="module")
def in_ram() -> Iterator[pathlib.Path]:
    """Files in RAM where possible: the speed of fsync is not tested here."""
    place = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as root:
        yield pathlib.Path(root)


def make_engine() -> IoEngine:
    return IoEngine(is_uring=False)


def reopen_and_judge(directories: list[pathlib.Path], life: Life) -> None:
    with contextlib.closing(make_engine()) as engine:
        if not life.num_sealed and len(life.mirrors) < 2:
            with contextlib.suppress(CheckpointError), opened(directories, engine) as store:
                life.judge(store)
            return
        with opened(directories, engine, RESIDENT) as store:
            life.judge(store)
            # And life goes on.
            update_all(store, 9)
            store.seal(step=9)


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("fault_name", FAULTS)
def test_a_fault_at_any_request_gives_its_error_and_the_last_seal_survives(
    in_ram: pathlib.Path, fault_name: str, stride: int
) -> None:
    fault, expected = FAULTS[fault_name]
    clean = FaultEngine(make_engine())
    place = in_ram / f"{fault_name} {stride}".replace("/", " ")
    Life().run(make_directories(place / "clean", 2), clean)
    clean.close()
    assert clean.num_requests > 60
    first = 1 + list(FAULTS).index(fault_name) % stride
    for number in range(first, clean.num_requests + 1, stride):
        operation = clean.tickets[number - 1].operation
        directories = make_directories(place / str(number), 2)
        life = Life()
        with nothing_leaks():
            engine = FaultEngine(make_engine(), faults={number: fault})
            is_harmless = operation is Operation.FLUSH and isinstance(fault, Shorten | Damage)
            if is_harmless:
                life.run(directories, engine)
            elif isinstance(fault, Damage) and operation is Operation.WRITE:
                # Found when it is read: in this life, or when the run is opened.
                with contextlib.suppress(Corrupt):
                    life.run(directories, engine)
            else:
                with pytest.raises(expected) as caught:
                    life.run(directories, engine)
                assert caught.value.path is not None
                assert operation is Operation.FLUSH or "block" in str(caught.value)
            assert all(engine.is_done(ticket) for ticket in engine.tickets)
            engine.close()
        if isinstance(fault, Damage) and operation is Operation.WRITE:
            with contextlib.suppress(Corrupt):
                reopen_and_judge(directories, life)
        else:
            reopen_and_judge(directories, life)


def test_a_fault_at_any_request_of_opening_changes_nothing(in_ram: pathlib.Path) -> None:
    directories = make_directories(in_ram / "opening", 2)
    life = Life()
    with contextlib.closing(make_engine()) as engine:
        life.run(directories, engine)
    clean = FaultEngine(make_engine())
    with opened(directories, clean, RESIDENT):
        pass
    clean.close()
    for fault, expected in FAULTS.values():
        for number in range(1, clean.num_requests + 1):
            with nothing_leaks():
                engine = FaultEngine(make_engine(), faults={number: fault})
                with pytest.raises(expected), opened(directories, engine, RESIDENT):
                    pass
                engine.close()
    for number in range(1, clean.num_setup_calls + 1):
        with nothing_leaks():
            engine = FaultEngine(make_engine(), setup_faults={number: Fail(errno=errno.EIO)})
            with pytest.raises(StorageError), opened(directories, engine, RESIDENT):
                pass
            engine.close()
    reopen_and_judge(directories, life)


def test_a_failure_while_a_store_is_made_leaves_nothing_behind(in_ram: pathlib.Path) -> None:
    directories = make_directories(in_ram / "making", 2)
    for number in range(1, 5):
        with nothing_leaks():
            run = RunDirectories.create(directories, RUN_ID)
            engine = FaultEngine(make_engine(), setup_faults={number: Fail(errno=errno.ENOSPC)})
            with pytest.raises(OutOfSpace):
                create_states(run, LAYOUT, engine=engine, resident_parts=RESIDENT)
            engine.close()
            run.close(should_delete=True)
            assert [list(directory.iterdir()) for directory in directories] == [[], []]


def test_a_disk_too_small_is_refused_before_anything_is_made(in_ram: pathlib.Path) -> None:
    directories = make_directories(in_ram / "too small", 1)
    run = RunDirectories.create(directories, RUN_ID)
    needed = 2 * LAYOUT.slot_bytes() + LAYOUT.frozen_bytes()
    engine = MemoryEngine(capacity_bytes=needed - 1)
    with pytest.raises(OutOfSpace, match="are needed on the filesystem"):
        create_states(run, LAYOUT, engine=engine, chunk_bytes=4096)
    run.close(should_delete=True)
    assert list(directories[0].iterdir()) == []


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.long)])
def test_power_can_fail_at_any_event(in_ram: pathlib.Path, stride: int) -> None:
    countdown = Countdown()
    engine = VolatileEngine(make_engine(), countdown)
    with counted_system_calls(countdown):
        Life().run(make_directories(in_ram / f"power {stride}" / "clean", 2), engine)
    engine.close()
    assert countdown.num_events > 100
    for number in range(1, countdown.num_events + 1, stride):
        directories = make_directories(in_ram / f"power {stride}" / str(number), 2)
        life = Life()
        with nothing_leaks():
            countdown = Countdown(stop_at=number)
            engine = VolatileEngine(make_engine(), countdown)
            with pytest.raises(PowerCut), counted_system_calls(countdown):
                life.run(directories, engine)
            engine.close()
        engine.cut(seed=number)
        # A manifest that reached one directory only is told by a warning.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *args, **kwargs: None)
            reopen_and_judge(directories, life)


def test_a_full_disk_while_the_manifest_is_written_can_be_tried_again(
    in_ram: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = make_directories(in_ram / "manifest full", 2)
    with contextlib.closing(make_engine()) as engine:
        with created(directories, LAYOUT, engine, RESIDENT) as store:
            store.fill(random_tensors(LAYOUT).items())
            store.seal(step=0)
            first = MirrorStates(contents(store))
            update_all(store, 1)

            def full(*args: object) -> int:
                raise OSError(errno.ENOSPC, "full")

            with monkeypatch.context() as patch:
                patch.setattr(os, "write", full)
                with pytest.raises(OutOfSpace, match="a manifest could not be written"):
                    store.seal(step=1)
            names = sorted(os.listdir(directories[0] / f"lohan-{RUN_ID}"))
            assert names == ["lock", "manifest.json", "states.0.bin"]
            update_all(store, 2)
            mirror = first.copy()
            mirror.update_all(1)
            mirror.update_all(2)
            store.seal(step=2)
        with opened(directories, engine) as store:
            mirror.judge(contents(store))


def test_a_manifest_in_doubt_stops_updates_until_the_run_is_opened_again(
    in_ram: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = make_directories(in_ram / "doubt", 2)
    with contextlib.closing(make_engine()) as engine:
        with created(directories, LAYOUT, engine) as store:
            store.fill(random_tensors(LAYOUT).items())
            store.seal(step=0)
            update_all(store, 1)
            mirror = MirrorStates(contents(store))
            replace, calls = os.replace, []

            def second_fails(*args: str) -> None:
                calls.append(args)
                if len(calls) == 2:
                    raise OSError(errno.EROFS, "read-only")
                replace(*args)

            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", second_fails)
                with pytest.raises(CopiesInDoubt, match="some the old one"):
                    store.seal(step=1)
            with pytest.raises(CheckpointError, match="neither be updated nor sealed"):
                store.begin_update(BlockId(0))
            with pytest.raises(CheckpointError, match="neither be updated nor sealed"):
                store.seal(step=1)
            mirror.judge(contents(store))
        with pytest.warns(UserWarning, match="is of seal 1"), opened(directories, engine) as store:
            mirror.judge(contents(store))


def test_a_failed_write_tears_its_block_only_and_the_store_refuses_to_seal(
    in_ram: pathlib.Path,
) -> None:
    directories = make_directories(in_ram / "torn", 2)
    engine = FaultEngine(make_engine())
    with created(directories, LAYOUT, engine) as store:
        store.fill(random_tensors(LAYOUT).items())
        store.seal(step=0)
        mirror = MirrorStates(contents(store))
        update_all(store, 1)
        pool = BufferPool("test")
        block = BlockId(1)
        store.begin_update(block)
        engine.faults = {engine.num_requests + 1: Fail(errno=errno.EIO)}
        with pool.allocate(4 * 2048) as buffer:
            ticket = store.start_write(block, Part.M32, 0, 1056, buffer)
            with pytest.raises(StorageError, match=r"\[0, 1056\) of M32 of block 1 \(second\)"):
                store.finish_update(block)
            with pytest.raises(StorageError):
                ticket.wait()
        with pytest.raises(CheckpointError, match="block second holds a mix of two steps: a write"):
            store.seal(step=1)
        with pytest.raises(CheckpointError):
            store.begin_update(block)
        store.begin_update(BlockId(0))
        store.verify()
        pool.close()
    engine.close()
    with contextlib.closing(make_engine()) as engine, opened(directories, engine) as store:
        mirror.judge(contents(store))


def test_a_drive_that_changes_bytes_of_a_fill_is_found_before_the_first_step(
    in_ram: pathlib.Path,
) -> None:
    directories = make_directories(in_ram / "fill damaged", 1)
    engine = FaultEngine(make_engine(), faults={3: Damage()})
    with created(directories, LAYOUT, engine, RESIDENT) as store:
        with pytest.raises(Corrupt, match="of block"):
            store.fill(random_tensors(LAYOUT).items())
        assert store.state_of(BlockId(0)) is BlockState.EMPTY
        store.fill(random_tensors(LAYOUT).items(), should_verify=False)
        store.seal(step=0)
    engine.close()
