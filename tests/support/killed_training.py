"""Kills processes that train, and goes on with what they leave. Run as a program.

    python -m support.killed_training DIRECTORY DEVICE ROUNDS

A program of its own, because it forks: importing everything once and having no thread of anybody
else makes a child cheap and safe. A child goes on from the last seal, steps and seals, and is
killed at an instant nobody chose. The last one ends the run. Exits with 0 if every resume gave the
states of that step of an undisturbed run, to the bit.
"""

import contextlib
import os
import pathlib
import random
import select
import signal
import sys
import warnings
from functools import partial

import torch

from support.engine_faults import States, assert_states, everything_moves, states_of
from support.engine_runs import EngineCase, attach, batches_of, build, optimizer_for
from support.killed_stores import start_child

NUM_STEPS = 6
LONGEST_SECONDS = 1.2
"""Of a child's life after it has opened the run: a few steps and seals."""


def trajectory(case: EngineCase, root: pathlib.Path) -> list[States]:
    """States before the first step and after each. In memory of the parent: children inherit it."""
    model = build(case)
    found = []
    with attach(case, model, optimizer_for(case, model), root) as engine:
        found.append(states_of(engine))
        for batches in batches_of(case):
            engine.step(batches)
            found.append(states_of(engine))
        engine.close(should_delete=True)
    return found


def go_on(
    case: EngineCase, root: pathlib.Path, run_id: str, expected: list[States], pipe: int
) -> None:
    """Runs in a child: judge the last seal, and train on, reporting every seal."""
    model = build(case)
    with attach(case, model, optimizer_for(case, model), root, run=run_id) as engine:
        assert_states(states_of(engine), expected[engine.num_steps])
        os.write(pipe, bytes([engine.num_steps]))
        steps = batches_of(case)
        while engine.num_steps < case.num_steps:
            engine.step(steps[engine.num_steps])
            if engine.num_steps % 2 == 0:
                engine.seal()
                os.write(pipe, bytes([engine.num_steps]))
        assert_states(states_of(engine), expected[-1])
        engine.seal()
        os.write(pipe, bytes([255]))


def new_run(case: EngineCase, root: pathlib.Path, pipe: int) -> None:
    model = build(case)
    with attach(case, model, optimizer_for(case, model), root) as engine:
        os.write(pipe, engine.run_id.encode())


def read_all(pipe: int) -> bytes:
    found = b""
    while chunk := os.read(pipe, 1000):
        found += chunk
    os.close(pipe)
    return found


def kill_and_go_on(root: pathlib.Path, device: str, num_rounds: int) -> int:
    case = everything_moves(device, num_steps=NUM_STEPS, num_ssds=2)
    build(case)  # imports what takes seconds, which every child would do again
    # In a child too: a process that forks must have no threads of its own.
    child, pipe = start_child(lambda _: torch.save(trajectory(case, root), root / "expected.pt"))
    os.close(pipe)
    assert os.waitpid(child, 0)[1] == 0
    expected = torch.load(root / "expected.pt")
    child, pipe = start_child(partial(new_run, case, root))
    run_id = read_all(pipe).decode()
    assert os.waitpid(child, 0)[1] == 0
    chance, at_step, num_killed = random.Random(0), 0, 0
    while True:
        child, pipe = start_child(partial(go_on, case, root, run_id, expected))
        opened = os.read(pipe, 1)
        assert opened, "a child could not go on"
        assert opened[0] in (at_step, at_step + 2), (opened, at_step)
        at_step = opened[0]
        if num_killed < num_rounds:
            # No condition to wait for: the instant of the kill is what is random here.
            select.select([], [], [], chance.uniform(0, LONGEST_SECONDS))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            num_killed += 1
        told = read_all(pipe)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or status == 0, status
        if told[-1:] == bytes([255]):
            if num_killed >= num_rounds:
                return num_killed
            # It ended before it was killed: begin another run.
            child, pipe = start_child(partial(new_run, case, root))
            run_id, at_step = read_all(pipe).decode(), 0
            assert os.waitpid(child, 0)[1] == 0
        elif told:
            at_step = told[-1]


def main() -> None:
    """A program for `run_forked`."""
    torch.set_num_threads(1)
    # A kill between two directories leaves an older copy of the manifest: told, and mended.
    warnings.simplefilter("ignore")
    print(f"{kill_and_go_on(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))} kills")


if __name__ == "__main__":
    main()
