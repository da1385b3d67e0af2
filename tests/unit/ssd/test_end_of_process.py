"""A program may end while daemon threads are inside native calls: no abort, no noise.

Every case runs several times, because which thread is where when the interpreter ends is chance.
"""

import pathlib
import subprocess
import sys

import pytest

from support.ssd_engines import make_engine

WAITING = """
import errno, os, sys, threading
from lohan.ssd import BufferPool, DriveSettings, IoEngine, Priority
engine = IoEngine(is_uring=sys.argv[2] == "io_uring")
drive = engine.add_drive(DriveSettings())
file = engine.create_file(sys.argv[1], drive=drive)
engine.resize(file, 1 << 20)
buffer = BufferPool("p").allocate(1 << 20)
for attempt in range(1, 60):  # busy while the interpreter ends
    engine.replace_result(drive, attempt, -errno.EAGAIN)
ticket = engine.start_write(file, 0, buffer.address, 1 << 20, Priority.PREFETCH)
for _ in range(3):
    threading.Thread(target=engine.wait, args=(ticket,), daemon=True).start()
os.unlink(sys.argv[1])
"""
COMPUTING = """
import threading
import numpy
from lohan.optimizer import num_leaves, sum_of_squares
grad = numpy.ones(1 << 22, dtype=numpy.float32)
def compute():
    sums = numpy.zeros(num_leaves(grad.size))
    while True:
        sum_of_squares(grad, sums)
for _ in range(3):
    threading.Thread(target=compute, daemon=True).start()
"""


def run(program: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("engine_name", ["io_uring", "threads"])
def test_a_program_ends_quietly_while_threads_wait_for_a_ticket(
    engine_name: str, tmp_path: pathlib.Path
) -> None:
    make_engine(engine_name).close()  # skips where there is none
    for _ in range(5):
        assert run(WAITING, str(tmp_path / "f"), engine_name) == (0, "", "")


def test_a_program_ends_quietly_while_threads_are_inside_a_kernel() -> None:
    for _ in range(5):
        assert run(COMPUTING) == (0, "", "")
