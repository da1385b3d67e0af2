"""Measuring in trouble: requests fail, the disk is full, Ctrl-C. Nothing is ever left."""

import errno
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from lohan.errors import OutOfSpace, StorageError
from lohan.measure import measure_machine
from lohan.ssd import IoEngine, choose_engine
from support.fault_engine import Fail, Fault, FaultEngine, Shorten
from support.profiles import quick_instruments, quick_options

ROOT = pathlib.Path(__file__).parents[2]
NUM_FIRST_WRITES = 8


class Faults:
    """Makes engines that count their requests together, as one long run."""

    def __init__(self, *, nth: int, fault: Fault | None, setup_nth: int = 0) -> None:
        self.nth, self.fault, self.setup_nth = nth, fault, setup_nth
        self.engines: list[FaultEngine] = []

    def make_engine(self) -> IoEngine:
        done = sum(engine.num_requests for engine in self.engines)
        calls = sum(engine.num_setup_calls for engine in self.engines)
        engine = FaultEngine(
            choose_engine()[0],
            faults={self.nth - done: self.fault} if self.fault is not None else {},
            setup_faults={self.setup_nth - calls: Fail(errno=errno.ENOSPC)},
        )
        self.engines.append(engine)
        return engine


def measure(root: pathlib.Path, faults: Faults) -> None:
    measure_machine(**quick_options(root), instruments=quick_instruments(faults.make_engine))


# Of the first write of the file, of the search for settings, and of figures.
@pytest.mark.parametrize("nth", [1, 5, 9, 10, 30, 60, 90])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fail(errno=errno.EIO), StorageError),
        (Fail(errno=errno.ENOSPC), OutOfSpace),
        (Shorten(), StorageError),
    ],
)
def test_a_request_that_fails_is_the_error_and_nothing_is_left(
    tmp_path: pathlib.Path, nth: int, fault: Fault, kind: type[StorageError]
) -> None:
    if nth == NUM_FIRST_WRITES + 1 and isinstance(fault, Shorten):
        pytest.skip("this one is a flush, which cannot be short")
    with pytest.raises(kind) as raised:
        measure(tmp_path, Faults(nth=nth, fault=fault))
    assert str(tmp_path) in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nth", [1, 2, 3, 7])
def test_a_file_that_cannot_be_made_or_opened_is_the_error(
    tmp_path: pathlib.Path, nth: int
) -> None:
    with pytest.raises(OutOfSpace):
        measure(tmp_path, Faults(nth=0, fault=None, setup_nth=nth))
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
    import pathlib, sys
    from lohan.measure import measure_machine
    from support.profiles import quick_instruments, quick_options
    root = pathlib.Path(sys.argv[1])
    options = {**quick_options(root), "sustained_seconds": 3600}
    measure_machine(**options, instruments=quick_instruments(),
                    report=lambda line: print(line, flush=True))
"""


def start(root: pathlib.Path, *, wait_for: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if wait_for in line:
            return process
    raise AssertionError(process.communicate())


@pytest.mark.slow
def test_ctrl_c_leaves_no_file(tmp_path: pathlib.Path) -> None:
    process = start(tmp_path, wait_for="sustained writes")
    assert len(list(tmp_path.iterdir())) == 1
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=840)
    assert "KeyboardInterrupt" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_vanishes_meanwhile_is_an_error(tmp_path: pathlib.Path) -> None:
    calls = Faults(nth=0, fault=None)
    real = calls.make_engine

    def vanish() -> IoEngine:
        if len(calls.engines) == 4:
            for path in tmp_path.glob("*/*"):
                path.unlink()
        return real()

    calls.make_engine = vanish  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="could not be opened"):
        measure(tmp_path, calls)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_measurement_left_is_told_to_the_next(tmp_path: pathlib.Path) -> None:
    process = start(tmp_path, wait_for="sustained writes")
    process.kill()
    process.communicate(timeout=840)
    (left,) = tmp_path.iterdir()
    said: list[str] = []
    found = measure_machine(
        **quick_options(tmp_path), instruments=quick_instruments(), report=said.append
    )
    assert any(str(left) in note for note in found.notes)
    assert list(tmp_path.iterdir()) == [left]
