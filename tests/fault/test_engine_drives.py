"""Drives that damage bytes, are full, or answer slowly."""

import errno
from pathlib import Path

import pytest

from lohan.errors import Corrupt, OutOfSpace
from lohan.ssd import DriveId, IoFile, Operation
from support.engine_faults import (
    Disturbed,
    assert_states,
    disturbed_run,
    everything_moves,
    go_on,
    is_empty,
    make_device,
    run_with_faults,
    states_of,
    threads_io,
    undisturbed,
    watched,
)
from support.engine_runs import attach, batches_of, build, optimizer_for
from support.fault_engine import Damage, Delay, Fail, FaultEngine
from support.ssd_engines import nothing_leaks

DEVICES = ["cpu", "emulated"]


class DamagingEngine(FaultEngine):
    """Damages the N-th read of files whose name begins with some word."""

    def __init__(self, word: str, number: int) -> None:
        super().__init__(threads_io())
        self._word, self._number, self._num_seen = word, number, 0

    def _start(self, operation, file, *rest):  # type: ignore[no-untyped-def]
        if operation is Operation.READ and Path(file.path).name.startswith(self._word):
            self._num_seen += 1
            if self._num_seen == self._number:
                self.faults[self.num_requests + 1] = Damage()
        return super()._start(operation, file, *rest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [1, 8])
def test_damaged_activations_and_gradients_are_found_when_they_come_back(
    device: str, number: int, tmp_path: Path
) -> None:
    """Both lie in one file; the first read of a run is of an activation, the eighth of either."""
    case = everything_moves(device)
    expected = undisturbed(case, tmp_path)
    told = disturbed_run(case, tmp_path, io=DamagingEngine("activations", number))
    assert isinstance(told.error, Corrupt), told
    assert "on lane ssd_read" in "\n".join(told.error.__notes__)
    go_on(case, tmp_path, told, expected)


def test_damaged_bytes_of_a_seal_are_found_when_it_is_opened(tmp_path: Path) -> None:
    case = everything_moves("cpu")
    told, _ = run_with_faults(case, tmp_path, {})
    (path,) = tmp_path.glob("ssd0/lohan-*/states.0.bin")
    kept = path.read_bytes()
    model = build(case)
    path.write_bytes(bytes(byte ^ 0x10 for byte in kept))
    with nothing_leaks(), pytest.raises(Corrupt):
        attach(case, model, optimizer_for(case, model), tmp_path, run=told.run_id)
    path.write_bytes(kept)
    go_on(case, tmp_path, told, undisturbed(case, tmp_path))


@pytest.mark.parametrize("device", DEVICES)
def test_a_slow_drive_changes_no_bit(device: str, tmp_path: Path) -> None:
    """Every other request begins only when somebody waits for it."""
    case = everything_moves(device)
    expected = undisturbed(case, tmp_path)
    slow = {number: Delay() for number in range(1, 1000, 2)}
    told, io = run_with_faults(case, tmp_path, slow)
    assert told.error is None
    assert io.num_requests > 400
    told.sealed = 3
    go_on(case, tmp_path, told, expected)


@pytest.mark.parametrize("number", [1, 2])
def test_a_drive_too_full_for_the_states_is_told_at_attach(number: int, tmp_path: Path) -> None:
    case = everything_moves("cpu")
    io = FaultEngine(threads_io(), setup_faults={number: Fail(errno=errno.ENOSPC)})
    told = disturbed_run(case, tmp_path, io=io)
    assert isinstance(told.error, OutOfSpace)
    assert told.run_id is None
    assert is_empty(tmp_path)


def test_a_drive_too_full_to_swap_to_is_told_before_a_state_is_written(tmp_path: Path) -> None:
    case = everything_moves("cpu")
    io = NoSwapRoom(threads_io())
    io.is_full = True
    told = disturbed_run(case, tmp_path, io=io)
    assert isinstance(told.error, OutOfSpace)
    assert "of states a step needs" in told.error.why
    assert told.run_id is None
    assert io.num_requests == 0
    assert is_empty(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("residents", [False, True])
def test_a_drive_too_full_to_swap_to_is_told_and_loses_no_step(
    device: str, residents: bool, tmp_path: Path
) -> None:
    """No room for a plan's swap file: the step is refused, and can be taken once there is room;
    what steps before it changed is not forgotten, be it in RAM or on SSD."""
    case = everything_moves(device, residents=residents)
    expected = undisturbed(case, tmp_path)
    io = NoSwapRoom(threads_io())
    model = build(case)
    steps = batches_of(case)
    with watched(), make_device(device) as own:
        with attach(case, model, optimizer_for(case, model), tmp_path, io=io, device=own) as engine:
            io.is_full = True
            with pytest.raises(OutOfSpace):
                engine.step(steps[0])
            io.is_full = False
            engine.step(steps[0])
            engine.step(steps[1])
            io.is_full = True
            with pytest.raises(OutOfSpace):
                engine.step([*steps[2], *steps[2]])
            io.is_full = False
            assert_states(states_of(engine), expected[2])
            engine.step(steps[2])
            engine.seal()
            engine.step(steps[3])
            assert_states(states_of(engine), expected[4])
            told = Disturbed(run_id=engine.run_id, sealed=3)
        assert not own._pinned
    go_on(case, tmp_path, told, expected)


class NoSwapRoom(FaultEngine):
    """While told so, the filesystem has no room for a swap file."""

    is_full = False

    def create_file(self, path: str, *, drive: DriveId) -> IoFile:
        if self.is_full and "activations" in path:
            self.setup_faults[self.num_setup_calls + 1] = Fail(errno=errno.ENOSPC)
        return super().create_file(path, drive=drive)
