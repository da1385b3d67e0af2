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
from support.fault_engine import Fail, Fault, FaultEngine, FaultTicket, Place, Shorten

NUM_REQUESTS = 356
"""Of a run of two steps: laying out, a step, its seal, and a step that finds updates put off."""
NUM_CHUNKS = 12
NUM_SHORT_CHUNKS = 2
DEVICES = ["cpu", "emulated"]

FAULTS: dict[str, tuple[Fault, type[StorageError]]] = {
    "input/output error": (Fail(errno=errno.EIO), StorageError),
    "disk full": (Fail(errno=errno.ENOSPC), OutOfSpace),
    "short": (Shorten(), ShortTransfer),
}


def check(
    device: str,
    where: int | Place,
    fault: Fault,
    kind: type[StorageError],
    root: Path,
    num_steps: int = NUM_STEPS,
) -> None:
    case = everything_moves(device, num_steps=num_steps)
    expected = undisturbed(case, root)
    told, io = run_with_faults(case, root, {where: fault})
    met = next((ticket for ticket in io.tickets if ticket.fault is not None), None)
    if met is None:
        assert isinstance(where, int), f"no such request: {where}"
        assert NUM_REQUESTS - 20 < io.num_requests < where, io.num_requests
        assert told.error is None
    elif isinstance(fault, Shorten) and met.error is None:
        assert told.error is None  # a flush cannot be short
    else:
        judge_error(told, met, kind)
    if told.run_id is None:
        assert is_empty(root)
    else:
        go_on(case, root, told, expected)


def judge_error(told: Disturbed, met: FaultTicket, kind: type[StorageError]) -> None:
    assert isinstance(told.error, kind), (met.place, told)
    notes = "\n".join(getattr(told.error, "__notes__", []))
    if told.stage != "attach" and met.operation is not Operation.FLUSH:
        assert "on lane ssd_" in notes, (met.place, told, notes)
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


def rows_of_requests(io: FaultEngine) -> list[list[Place]]:
    """Requests of one kind, in the order they came."""
    places = [ticket.place for ticket in io.tickets]
    kinds = dict.fromkeys((at.phase, at.operation, at.file_name) for at in places)
    return [
        [at for at in places if (at.phase, at.operation, at.file_name) == kind] for kind in kinds
    ]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(NUM_SHORT_CHUNKS))
@pytest.mark.parametrize("name", FAULTS)
def test_the_first_middle_and_last_request_of_each_kind_fails(
    name: str, chunk: int, tmp_path: Path
) -> None:
    """Each kind of request meets each kind of fault, one at each of the three places; devices take
    turns."""
    turn = list(FAULTS).index(name)
    case = everything_moves(DEVICES[0], num_steps=2)
    told, io = run_with_faults(case, tmp_path, {})
    assert told.error is None
    assert io.num_requests == NUM_REQUESTS
    rows = rows_of_requests(io)
    operations = {(row[0].phase, row[0].operation) for row in rows}
    assert operations >= {("step 2", Operation.READ), ("step 2", Operation.WRITE)}
    assert operations >= set(itertools.product(["", "step 1"], Operation))
    for number, row in list(enumerate(rows))[chunk::NUM_SHORT_CHUNKS]:
        root = tmp_path / str(number)
        root.mkdir()
        where = [row[0], row[len(row) // 2], row[-1]][(number + turn) % 3]
        check(DEVICES[(number + turn) % 2], where, *FAULTS[name], root, num_steps=2)


@pytest.mark.long
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
