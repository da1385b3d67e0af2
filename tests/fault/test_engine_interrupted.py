"""Errors of the user's own code and Ctrl-C, anywhere in a step: what is seen, and what is left."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lohan.engine.engine import Engine
from lohan.ssd import Operation, Ticket
from support.engine_faults import (
    disturbed_run,
    everything_moves,
    go_on,
    is_empty,
    threads_io,
    undisturbed,
)
from support.fault_engine import FaultEngine, FaultTicket


class Mine(Exception):
    """An error of the user's."""


class Countdown:
    """Raises when it is called for the N-th time."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.num_left, self.error = number, error

    def __call__(self) -> None:
        self.num_left -= 1
        if not self.num_left:
            raise self.error


def when_called(path: str, number: int) -> Callable[[Engine, BaseException], None]:
    """Raise in the N-th call of a module."""

    def prepare(engine: Engine, error: BaseException) -> None:
        # A block may not change what a closure holds; an iterator moves unseen.
        calls = itertools.count(1)

        def count(*_: object) -> None:
            if next(calls) == number:
                raise error

        engine.model.get_submodule(path).register_forward_hook(count)

    return prepare


def when_backward(path: str) -> Callable[[Engine, BaseException], None]:
    """Raise when a gradient reaches the output of a module."""

    def prepare(engine: Engine, error: BaseException) -> None:
        count = Countdown(1, error)

        def watch(_module: object, _inputs: object, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: count())

        engine.model.get_submodule(path).register_forward_hook(watch)

    return prepare


PLACES = {
    "forward, before the blocks": when_called("model.embed_tokens", 1),
    "forward of a block": when_called("model.layers.1.mlp", 1),
    "forward, behind the blocks": when_called("lm_head", 1),
    "backward behind the blocks": when_backward("lm_head"),
    "a block run again": when_called("model.layers.1.mlp", 2),
    "backward of a block": when_backward("model.layers.0.mlp"),
    "backward before the blocks": when_backward("model.embed_tokens"),
}


def at(stage: str, act: Callable[[Engine], None]) -> Callable[[Engine, str], None]:
    return lambda engine, now: act(engine) if now == stage else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "device"),
    [(place, ["cpu", "emulated"][number % 2]) for number, place in enumerate(PLACES)],
)
@pytest.mark.parametrize("error", [Mine("my words"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_an_error_in_the_model_is_seen_as_it_is_and_the_last_seal_is_intact(
    place: str, device: str, error: BaseException, tmp_path: Path
) -> None:
    case = everything_moves(device)
    expected = undisturbed(case, tmp_path)
    error.__notes__ = []
    told = disturbed_run(
        case, tmp_path, before=at("step 2", lambda engine: PLACES[place](engine, error))
    )
    assert told.error is error
    assert told.stage == "step 2"
    assert "micro-batch 0" in "\n".join(error.__notes__)
    go_on(case, tmp_path, told, expected)


def test_an_error_of_the_loss_function_is_seen_as_it_is(tmp_path: Path) -> None:
    case = everything_moves("emulated")
    expected = undisturbed(case, tmp_path)
    count = Countdown(2, Mine("my words"))

    def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        count()
        loss: torch.Tensor = model(**batch).loss
        count()
        return loss

    def use(engine: Engine) -> None:
        engine._setup.options = replace(engine._setup.options, loss_fn=loss_fn)

    told = disturbed_run(case, tmp_path, before=at("step 2", use))
    assert told.error is count.error
    assert "micro-batch 0" in "\n".join(told.error.__notes__)
    go_on(case, tmp_path, told, expected)


class BlockingEngine(FaultEngine):
    """Once armed, the next request of a kind is waited for in vain until it is let go."""

    def __init__(self, armed: Operation | None = None) -> None:
        super().__init__(threads_io())
        self.armed = armed
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()

    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, FaultTicket)
        if ticket.operation is self.armed:
            self.armed = None
            self.is_reached.set()
            self.may_go_on.wait()
        super().wait(ticket)


@contextlib.contextmanager
def ctrl_c_when_blocked(io: BlockingEngine) -> Iterator[None]:
    """A real signal, when the drive is waited for; the drive answers a moment later."""

    def interrupt() -> None:
        io.is_reached.wait()
        os.kill(os.getpid(), signal.SIGINT)
        # A lane that waits for a drive is waited for: nothing may write to memory that is gone.
        answer = threading.Timer(0.1, io.may_go_on.set)
        answer.start()
        answer.join()

    thread = threading.Thread(target=interrupt, name="interrupt")
    thread.start()
    try:
        yield
    finally:
        io.is_reached.set()
        thread.join()


@pytest.mark.parametrize(
    ("stage", "operation"),
    [
        ("step 1", Operation.READ),
        ("step 2", Operation.WRITE),
        ("seal 1", Operation.FLUSH),
        ("seal 3", Operation.WRITE),
        ("synchronize", Operation.WRITE),
    ],
)
def test_ctrl_c_while_a_drive_is_waited_for_ends_the_run_at_its_last_seal(
    stage: str, operation: Operation, tmp_path: Path
) -> None:
    """The main thread waits for a lane, or for the drive itself."""
    case = everything_moves("cpu" if operation is Operation.WRITE else "emulated")
    expected = undisturbed(case, tmp_path)
    io = BlockingEngine()

    def arm(engine: Engine) -> None:
        io.armed = operation

    with ctrl_c_when_blocked(io):
        told = disturbed_run(case, tmp_path, io=io, before=at(stage, arm))
    assert isinstance(told.error, KeyboardInterrupt)
    assert told.stage == stage
    go_on(case, tmp_path, told, expected)


@pytest.mark.parametrize("operation", list(Operation))
def test_ctrl_c_during_attach_leaves_nothing(operation: Operation, tmp_path: Path) -> None:
    case = everything_moves("cpu")
    io = BlockingEngine(operation)
    with ctrl_c_when_blocked(io):
        told = disturbed_run(case, tmp_path, io=io)
    assert isinstance(told.error, KeyboardInterrupt)
    assert told.stage == "attach"
    assert is_empty(tmp_path)


@pytest.mark.parametrize("residents", [False, True])
def test_ctrl_c_while_a_run_is_taken_up_leaves_it_as_it_was(
    residents: bool, tmp_path: Path
) -> None:
    """While its seal is verified, or its resident states are read."""
    case = everything_moves("cpu", residents=residents)
    expected = undisturbed(case, tmp_path)
    told = disturbed_run(case, tmp_path)
    for stage in ("attach", "step 4") if residents else ("attach",):
        io = BlockingEngine(Operation.READ if stage == "attach" else None)

        def arm(engine: Engine, io: BlockingEngine = io) -> None:
            io.armed = Operation.READ

        with ctrl_c_when_blocked(io):
            again = disturbed_run(case, tmp_path, io=io, run=told.run_id, before=at("step 4", arm))
        assert isinstance(again.error, KeyboardInterrupt)
        assert again.stage == stage
    go_on(case, tmp_path, told, expected)
