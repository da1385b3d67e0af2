"""What can be done with an engine that failed, is closed, or has a neighbour in its directory."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.engine.engine import Engine
from lohan.errors import CheckpointError, ConfigError, Corrupt, ScheduleError, StorageError
from lohan.store import StateStoreWarning
from support.engine_faults import (
    Disturbed,
    assert_states,
    disturbed_run,
    everything_moves,
    go_on,
    is_empty,
    states_of,
    undisturbed,
    watched,
)
from support.engine_runs import EngineCase, attach, batches_of, build, optimizer_for


def attached(case: EngineCase, directory: Path, **options: Any) -> Any:
    model = build(case)
    return attach(case, model, optimizer_for(case, model), directory, **options)


def test_after_a_failure_every_call_says_so_and_how_to_go_on(tmp_path: Path) -> None:
    case = everything_moves("cpu")
    steps = batches_of(case)

    def bad_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        raise ValueError("mine")

    with watched():
        engine = attached(case, tmp_path)
        engine.step(steps[0])
        engine.seal()
        with pytest.raises(ValueError, match="mine"):
            engine.step(steps[1], bad_loss)
        calls = [
            lambda: engine.step(steps[1]),
            lambda: engine.evaluate(steps[1]),
            lambda: engine.prepare(steps[1]),
            lambda: list(engine.weights()),
            lambda: list(engine.moments()),
            engine.synchronize,
            engine.seal,
        ]
        for call in calls:
            with pytest.raises(CheckpointError) as caught:
                call()
            text = str(caught.value)
            assert "ValueError: mine" in text
            assert f"run={engine.run_id!r}" in text
            assert "step 1" in text
            assert isinstance(caught.value.__cause__, ValueError)
        assert engine.sealed.step == 1
        engine.trace()
        engine.close()
        engine.close()
        told = Disturbed(run_id=engine.run_id, sealed=1)
        # What a caught error holds on to is not leaked.
        calls.clear()
        caught.value.__cause__.__traceback__ = caught.value.__traceback__ = None
    go_on(case, tmp_path, told, undisturbed(case, tmp_path))


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    case = everything_moves("emulated")
    with watched():
        engine = attached(case, tmp_path)
        engine.close(should_delete=True)
        engine.close()
        engine.close(should_delete=True)
        for call in (
            lambda: engine.step(batches_of(case)[0]),
            lambda: engine.evaluate(batches_of(case)[0]),
            lambda: list(engine.weights()),
            engine.synchronize,
            engine.seal,
        ):
            with pytest.raises(ScheduleError, match="closed"):
                call()
    assert is_empty(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_closing_while_updates_are_under_way_goes_back_to_the_last_seal(
    device: str, tmp_path: Path
) -> None:
    case = everything_moves(device)
    with watched():
        with attached(case, tmp_path) as engine:
            told = Disturbed(run_id=engine.run_id, sealed=1)
            for number, batches in enumerate(batches_of(case)[:3]):
                engine.step(batches)
                if number == 0:
                    engine.seal()
        del engine
    go_on(case, tmp_path, told, undisturbed(case, tmp_path))


def test_an_error_inside_the_with_block_is_what_comes_out_of_it(tmp_path: Path) -> None:
    case = everything_moves("emulated")
    told = Disturbed(sealed=0)

    def fail_after_a_step() -> None:
        with attached(case, tmp_path) as engine:
            told.run_id = engine.run_id
            engine.step(batches_of(case)[0])
            raise KeyError("mine")

    with watched(), pytest.raises(KeyError, match="mine"):
        fail_after_a_step()
    go_on(case, tmp_path, told, undisturbed(case, tmp_path))


CALLS: list[Callable[[Engine], object]] = [
    lambda engine: engine.close(),
    lambda engine: engine.seal(),
    lambda engine: list(engine.weights()),
    lambda engine: engine.evaluate(batches_of(everything_moves("cpu"))[1]),
    lambda engine: engine.step(batches_of(everything_moves("cpu"))[1]),
]


def test_an_engine_called_within_its_own_step_refuses_and_the_step_ends(tmp_path: Path) -> None:
    """From the user's loss function, which runs on another thread than the step."""
    case = everything_moves("cpu")

    def calling_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        for call in CALLS:
            with pytest.raises(ScheduleError, match="within its own work"):
                call(engine)
        engine.close()
        return loss

    with watched():
        engine = attached(case, tmp_path)
        told = Disturbed(run_id=engine.run_id, sealed=0)
        with pytest.raises(ScheduleError, match="within its own work"):
            engine.step(batches_of(case)[0], calling_loss)
        with pytest.raises(CheckpointError, match="within its own work"):
            engine.step(batches_of(case)[0])
        engine.close()
    go_on(case, tmp_path, told, undisturbed(case, tmp_path))


def test_a_model_can_be_attached_again_after_its_engine_is_closed(tmp_path: Path) -> None:
    """Its weights are with the run; without it there is nothing to start from."""
    case = everything_moves("emulated")
    model = build(case)
    optimizer = optimizer_for(case, model)
    with watched():
        with attach(case, model, optimizer, tmp_path) as engine:
            engine.step(batches_of(case)[0])
            engine.seal()
        with pytest.raises(ConfigError, match=r"an engine took them.*run="):
            attach(case, model, optimizer, tmp_path)
        with attach(case, model, optimizer, tmp_path, run=engine.run_id) as engine:
            for batches in batches_of(case)[1:]:
                engine.step(batches)
            assert_states(states_of(engine), undisturbed(case, tmp_path)[-1])
            engine.close(should_delete=True)
    assert is_empty(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("is_first_closed_first", [True, False])
def test_two_engines_in_one_directory_do_not_meet(
    is_first_closed_first: bool, tmp_path: Path
) -> None:
    one, other = everything_moves("cpu"), everything_moves("emulated", max_grad_norm=None)
    expected = undisturbed(one, tmp_path), undisturbed(other, tmp_path)
    with watched():
        engines = [attached(one, tmp_path), attached(other, tmp_path)]
        assert engines[0].run_id != engines[1].run_id
        for batches in batches_of(one):
            for engine in engines:
                engine.step(batches)
        for engine, states in zip(engines, expected, strict=True):
            assert_states(states_of(engine), states[-1])
        for engine in engines if is_first_closed_first else reversed(engines):
            engine.close(should_delete=True)
        del engine, engines
    assert is_empty(tmp_path)


def test_a_run_that_is_going_on_cannot_be_taken_up_a_second_time(tmp_path: Path) -> None:
    case = everything_moves("cpu")
    with watched(), attached(case, tmp_path) as engine:
        engine.step(batches_of(case)[0])
        with pytest.raises(StorageError, match=engine.run_id):
            attached(case, tmp_path, run=engine.run_id)
        engine.step(batches_of(case)[1])
        assert_states(states_of(engine), undisturbed(case, tmp_path)[2])
        engine.close(should_delete=True)
    assert is_empty(tmp_path)


def test_weights_left_half_read_do_not_keep_training_from_going_on(tmp_path: Path) -> None:
    case = everything_moves("cpu")
    with watched(), attached(case, tmp_path) as engine:
        for number, batches in enumerate(batches_of(case)):
            engine.step(batches)
            for _ in engine.weights():
                break
            engine.seal(metadata={"at": number})
        assert_states(states_of(engine), undisturbed(case, tmp_path)[-1])
        assert engine.sealed.metadata == {"at": 3}
        engine.close(should_delete=True)


def test_a_run_with_one_slot_says_that_it_cannot_be_taken_up(tmp_path: Path) -> None:
    """It was told so when the run was made."""
    case = everything_moves("cpu")
    with pytest.warns(StateStoreWarning, match="one slot"):
        engine = attached(case, tmp_path, num_slots=1)
    with engine:
        engine.step(batches_of(case)[0])
        engine.seal()
        engine.step(batches_of(case)[1])
        engine.synchronize()
        assert_states(states_of(engine), undisturbed(case, tmp_path)[2])
    with watched(), pytest.raises(Corrupt, match="one slot"):
        attached(case, tmp_path, run=engine.run_id)


def test_threads_of_an_engine_are_there_only_while_it_has_a_plan(tmp_path: Path) -> None:
    case = everything_moves("cpu")

    def lanes() -> int:
        return sum(one.name.startswith("lohan-") for one in threading.enumerate())

    with attached(case, tmp_path) as engine:
        assert lanes() == 0
        engine.step(batches_of(case)[0])
        assert lanes() == 5
    assert lanes() == 0
    told = disturbed_run(case, tmp_path, run=engine.run_id)
    assert told.error is None
