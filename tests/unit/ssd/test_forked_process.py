"""A process forked from one with a run: it can neither use the run nor harm it.

Forks happen in a process of their own, because forking this one, with its threads, is a warning.
"""

import pathlib
import subprocess
import sys

import pytest

from lohan.ssd import RunDirectories
from support.ssd_engines import make_engine

IN_A_CHILD = """
import errno, os, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from lohan.errors import LohanError, StorageError
from lohan.ssd import BufferPool, IoEngine, RunDirectories, StripedFile

engine = IoEngine(is_uring=sys.argv[2] == "io_uring")
run = RunDirectories.create([sys.argv[1]], "forked")
file = StripedFile.create(run, name="f", engine=engine, capacity_bytes=1 << 20)
pool = BufferPool("p")
buffer, extent = pool.allocate(1 << 20), file.allocate(1 << 20)
for attempt in range(1, 900):  # busy for about a second
    engine.replace_result(0, attempt, -errno.EAGAIN)
ticket = file.start_write(extent, address=buffer.address, nbytes=1 << 20)
child = os.fork()
if child == 0:
    said = []
    for attempt in (
        lambda: ticket.wait(),
        lambda: file.close(should_delete=True),
        lambda: run.close(should_delete=True),
    ):
        try:
            attempt()
            said.append("fine")
        except LohanError as error:
            said.append(type(error).__name__)
    print(*said, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.path.exists(file.paths[0]), "the child deleted a file of its parent"
try:
    RunDirectories.attach([sys.argv[1]], "forked")
    sys.exit("the child unlocked the run of its parent")
except StorageError as error:
    assert error.errno == errno.EWOULDBLOCK, error
ticket.wait()
file.close(should_delete=True)
pool.take_back(buffer)
pool.close()
engine.close()
run.close(should_delete=True)
"""


@pytest.mark.parametrize("engine_name", ["io_uring", "threads"])
def test_a_forked_child_is_told_at_once_and_does_no_harm(
    engine_name: str, tmp_path: pathlib.Path
) -> None:
    make_engine(engine_name).close()  # skips where there is none
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD, str(tmp_path), engine_name],
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("ScheduleError ScheduleError fine\n", "")
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_left_by_a_killed_process_can_be_taken_over(tmp_path: pathlib.Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, lohan.ssd\n"
            "run = lohan.ssd.RunDirectories.create(sys.argv[1:], 'left')\n"
            "print('ready', flush=True); sys.stdin.read()",
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        holder.kill()
    run = RunDirectories.attach([tmp_path], "left")
    run.close(should_delete=True)
    assert list(tmp_path.iterdir()) == []
