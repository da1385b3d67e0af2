"""Runs left on SSDs for tests: sealed, never sealed, held by another process."""

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from lohan.ssd import RunDirectories, choose_engine
from lohan.store import MIN_SCRATCH_BYTES, create_states
from support.state_stores import CHUNK, random_tensors, small_layout

_HOLD = """
import sys
from lohan.ssd import RunDirectories
run = RunDirectories.attach(sys.argv[2:], sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
"""


def leave_run(
    parents: Sequence[pathlib.Path],
    run_id: str,
    *,
    step: int | None = 7,
    metadata: dict[str, object] | None = None,
) -> None:
    """Make a run and leave it; without a step it was never sealed."""
    engine, _ = choose_engine()
    run = RunDirectories.create(parents, run_id)
    layout = small_layout()
    store = create_states(
        run, layout, engine=engine, chunk_bytes=CHUNK, scratch_bytes=MIN_SCRATCH_BYTES
    )
    if step is not None:
        store.fill(random_tensors(layout).items())
        store.seal(step=step, metadata={"model": "tiny"} if metadata is None else metadata)
    store.close()
    run.close()
    engine.close()


@contextlib.contextmanager
def held_elsewhere(run_id: str, *parents: pathlib.Path) -> Iterator[int]:
    """Another process holds a run for as long as the block lasts; gives its id."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, run_id, *map(str, parents)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process.pid
    finally:
        process.communicate("")
