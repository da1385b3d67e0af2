"""Runs left on SSDs for tests: the states of a model, filled and sealed."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lohan.ssd import IoEngine, RunDirectories
from lohan.store import (
    MIN_SCRATCH_BYTES,
    ComputeFormat,
    StateLayout,
    TensorEntry,
    create_states,
)
from support.state_stores import CHUNK


def leave_run(
    ssd: Sequence[pathlib.Path],
    run_id: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    metadata: dict[str, Any] | None = None,
    compute_format: ComputeFormat = ComputeFormat.BF16,
    is_sealed: bool = True,
) -> None:
    """Make a run whose last seal holds these tensors."""
    for directory in ssd:
        directory.mkdir(exist_ok=True)
    names = list(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    layout = StateLayout.pack(
        {
            f"block {number}": tuple(
                TensorEntry(name=name, shape=tuple(tensors[name].shape)) for name in half
            )
            for number, half in enumerate(halves)
        },
        compute_format=compute_format,
    )
    run = RunDirectories.create(ssd, run_id)
    engine = IoEngine(is_uring=False)
    try:
        with create_states(
            run, layout, engine=engine, chunk_bytes=CHUNK, scratch_bytes=MIN_SCRATCH_BYTES
        ) as store:
            store.fill(tensors.items())
            if is_sealed:
                store.seal(step=7, metadata=metadata)
    finally:
        engine.close()
        run.close()
