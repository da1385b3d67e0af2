"""Runs one architecture per process, each forked from this one with everything imported.

Owns the time limit and what is left of a child that ends badly: one row, whatever happened.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from support.sweep.catalogue import Family
from support.sweep.judged import CRASHED, TIME_LIMIT, Row, judge

_PRELOADED = (
    "lohan",
    "torch._dynamo",
    "torch._inductor",
    "transformers.modeling_utils",
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
    "diffusers.models.transformers",
    "diffusers.models.unets",
    "lohan.verify",
    "lohan.engine.attach",
)
_POLL_SECONDS = 0.05
_MOST_MEMORY_BYTES = 16 << 30


def sweep(
    families: Sequence[Family],
    *,
    num_jobs: int,
    limit_seconds: float,
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Judge all of them, `num_jobs` at a time; rows in the order of the families."""
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):  # a child imports what is missing
            importlib.import_module(name)
    torch.set_num_threads(1)
    assert threading.active_count() == 1, "a thread would not be there in a child"
    waiting, running, rows = list(families), {}, {}
    with tempfile.TemporaryDirectory(prefix="lohan-families-") as directory:
        while waiting or running:
            while waiting and len(running) < num_jobs:
                family = waiting.pop(0)
                place = Path(directory) / str(len(families) - len(waiting))
                place.mkdir()
                running[_fork(family, place)] = (family, place, time.monotonic())
            for child, (family, place, started) in list(running.items()):
                seconds = time.monotonic() - started
                ended, status = os.waitpid(child, os.WNOHANG)
                is_late = not ended and seconds > limit_seconds
                if is_late:
                    os.kill(child, signal.SIGKILL)
                    _, status = os.waitpid(child, 0)
                if ended or is_late:
                    del running[child]
                    row = _row_of(family, place, status, is_late, limit_seconds)
                    row.seconds = round(seconds, 1)
                    rows[family.name] = row
                    on_row(row)
                    shutil.rmtree(place)
            time.sleep(_POLL_SECONDS)
    return [rows[family.name] for family in families]


def _fork(family: Family, place: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
        with (place / "output").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            warnings.simplefilter("ignore")
            (place / "ssd").mkdir()
            row = judge(family, place / "ssd")
            (place / "row.json").write_text(json.dumps(dataclasses.asdict(row)))
            code = 0
    finally:
        os._exit(code)


def _row_of(family: Family, place: Path, status: int, is_late: bool, limit_seconds: float) -> Row:
    if (place / "row.json").exists():
        return Row(**json.loads((place / "row.json").read_text()))
    said = (place / "output").read_text(errors="replace").strip() if not is_late else ""
    reason = f"more than {limit_seconds:.0f} s" if is_late else f"status {status}: {said[-300:]}"
    return Row(
        name=family.name,
        kind=family.kind,
        class_name=family.class_name,
        outcome=TIME_LIMIT if is_late else CRASHED,
        reason=" ".join(reason.split()),
    )
