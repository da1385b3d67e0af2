"""Every request of a run to its drives goes wrong in turn.

The first error stops everything and is what the user sees, with its task's story; nothing is left
behind, and the run goes on from its last seal to the bits of a run that nothing happened to.
"""

import errno
import itertools
from pathlib import Path

import pytest

from lohan.errors import OutOfSpace, ShortTransfer, StorageError
from lohan.ssd import Operation
from support.engine_faults import (
    NUM_STEPS,
    Disturbed,
    everything_moves,
    go_on,
    is_empty,
    run_with_faults,
    undisturbed,
)
from support.fault_engine import Fail, Fault, FaultEngine, Shorten

NUM_REQUESTS = 356
"""Of a run of two steps: laying out, a step, its seal, and a step that finds updates put off."""
NUM_CHUNKS = 12
DEVICES = ["cpu", "emulated"]

FAULTS: dict[str, tuple[Fault, type[StorageError]]] = {
    "input/output error": (Fail(errno=errno.EIO), StorageError),
    "disk full": (Fail(errno=errno.ENOSPC), OutOfSpace),
    "short": (Shorten(), ShortTransfer),
}


def check(
    device: str,
    number: int,
    fault: Fault,
    kind: type[StorageError],
    root: Path,
    num_steps: int = NUM_STEPS,
) -> None:
    case = everything_moves(device, num_steps=num_steps)
    expected = undisturbed(case, root)
    told, io = run_with_faults(case, root, {number: fault})
    if io.num_requests < number:
        assert io.num_requests > NUM_REQUESTS - 20, io.num_requests
        assert told.error is None
    elif isinstance(fault, Shorten) and io.tickets[number - 1].error is None:
        assert told.error is None  # a flush cannot be short
    else:
        judge_error(told, io, number, kind)
    if told.run_id is None:
        assert is_empty(root)
    else:
        go_on(case, root, told, expected)


def judge_error(told: Disturbed, io: FaultEngine, number: int, kind: type[StorageError]) -> None:
    assert isinstance(told.error, kind), (number, told)
    notes = "\n".join(getattr(told.error, "__notes__", []))
    ticket = io.tickets[number - 1]
    if told.stage != "attach" and ticket.operation is not Operation.FLUSH:
        assert "on lane ssd_" in notes, (number, told, notes)
        assert notes.count("on lane") == 1, notes


@pytest.mark.parametrize(
    ("device", "name", "number"),
    [
        ("cpu", "disk full", 9),
        ("emulated", "input/output error", 101),
        ("cpu", "short", 187),
        ("emulated", "disk full", 262),
        ("cpu", "input/output error", 341),
        ("emulated", "short", 433),
    ],
)
def test_a_sample_of_requests_fails(device: str, name: str, number: int, tmp_path: Path) -> None:
    check(device, number, *FAULTS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_every_request_of_two_steps_fails(chunk: int, tmp_path: Path) -> None:
    """Each number once: all kinds of fault on both devices would take an hour of one core. They
    take turns, so that requests of one kind, which come in rows, meet all of them."""
    turns = list(itertools.product(DEVICES, FAULTS.values()))
    for number in range(1 + chunk, NUM_REQUESTS + 1, NUM_CHUNKS):
        device, (fault, kind) = turns[number // len(turns) % len(turns)]
        root = tmp_path / str(number)
        root.mkdir()
        check(device, number, fault, kind, root, num_steps=2)
