"""Kills processes that update and seal a store, and opens what they leave. Run as a program.

    python killed_stores.py points DIRECTORY    at every event of a store's life
    python killed_stores.py instants DIRECTORY ROUNDS    at random instants, the run going on

A program of its own, because it forks: importing everything once and having no thread of anybody
else makes a child cheap and safe. Exits with 0 if every opening gave the last seal to the bit.
"""

import contextlib
import os
import pathlib
import random
import select
import signal
import sys
import warnings
from collections.abc import Callable

import torch

from lohan.errors import CheckpointError
from lohan.ssd import IoEngine
from support.power_cut import Countdown, VolatileEngine, counted_system_calls
from support.sealing_workload import LAYOUT, POSITIONS, RESIDENT, Life
from support.state_stores import (
    MirrorStates,
    contents,
    created,
    make_directories,
    opened,
    random_tensors,
    update_all,
)


def make_engine() -> IoEngine:
    return IoEngine(is_uring=False)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork a child that works and reports to a pipe; gives its id and the pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            work(writer)
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(writer)
    return child, reader


class ReportingLife(Life):
    """Writes one byte to a pipe after every seal that has returned."""

    pipe = -1

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "num_sealed" and value and self.pipe >= 0:
            os.write(self.pipe, b"s")


def kill_at_every_event(root: pathlib.Path) -> int:
    countdown = Countdown()
    clean = Life()
    engine = VolatileEngine(make_engine(), countdown)
    with counted_system_calls(countdown):
        clean.run(make_directories(root / "clean", 2), engine)
    engine.close()
    num_events = countdown.num_events
    for number in range(1, num_events + 1):
        directories = make_directories(root / str(number), 2)

        def work(pipe: int, number: int = number, directories: list = directories) -> None:
            life = ReportingLife()
            countdown = Countdown(stop_at=number, on_stop=kill_self)
            with counted_system_calls(countdown):
                life.pipe = os.dup(pipe)
                life.run(directories, VolatileEngine(make_engine(), countdown))

        child, pipe = start_child(work)
        reported = b""
        while chunk := os.read(pipe, 100):
            reported += chunk
        os.close(pipe)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"event {number}: the child ended by itself: {status}"
        judge(directories, clean, len(reported), number)
    return num_events


def judge(directories: list[pathlib.Path], clean: Life, num_sealed: int, number: int) -> None:
    with contextlib.closing(make_engine()) as engine:
        try:
            with opened(directories, engine, RESIDENT) as store:
                assert store.sealed is not None
                step = store.sealed.step
                assert step in (num_sealed, num_sealed + 1), (number, step, num_sealed)
                clean.mirrors[step - 1].judge(contents(store))
        except CheckpointError:
            assert num_sealed == 0, number


def kill_at_random_instants(root: pathlib.Path, num_rounds: int) -> int:
    directories = make_directories(root, 2)
    with (
        contextlib.closing(make_engine()) as engine,
        created(directories, LAYOUT, engine, RESIDENT) as store,
    ):
        store.fill(random_tensors(LAYOUT).items())
        store.seal(step=0)
        mirror = MirrorStates(contents(store))
    chance = random.Random(0)
    at_step = 0

    def work(pipe: int) -> None:
        with opened(directories, make_engine(), RESIDENT) as store:
            assert store.sealed is not None
            step = store.sealed.step
            os.write(pipe, b"o")
            while True:
                step += 1
                update_all(store, step, POSITIONS)
                store.seal(step=step)
                os.write(pipe, b"s")

    for _ in range(num_rounds):
        child, pipe = start_child(work)
        assert os.read(pipe, 1) == b"o"
        # No condition to wait for: the instant of the kill is what is random here.
        select.select([], [], [], chance.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        reported = b""
        while chunk := os.read(pipe, 10_000):
            reported += chunk
        os.close(pipe)
        os.waitpid(child, 0)
        with contextlib.closing(make_engine()) as engine, opened(directories, engine) as store:
            assert store.sealed is not None
            found = store.sealed.step
            assert found - at_step - reported.count(b"s") in (0, 1), (found, at_step, reported)
            for step in range(at_step + 1, found + 1):
                mirror.update_all(step)
            at_step = found
            mirror.judge(contents(store))
    return at_step


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A kill between two directories leaves an older copy of the manifest: told, and mended.
    warnings.simplefilter("ignore")
    place = pathlib.Path(sys.argv[2])
    if sys.argv[1] == "points":
        print(f"{kill_at_every_event(place)} points")
    else:
        print(f"{kill_at_random_instants(place, int(sys.argv[3]))} steps")
