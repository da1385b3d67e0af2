"""The engine under a trainer in tests: real states on disk, little memory, one thread."""

import pathlib
from typing import Any

from lohan.engine.attach import attach_engine
from support.small_machines import small_machine

MIB = 1 << 20


def attach_small(
    model: Any, optimizer: Any, *, offload: Any, ssd: Any, progress: Any = None, **kwargs: Any
) -> Any:
    """In place of `lohan.train.trainer.attaching.attach_engine`: no machine is measured."""
    for place in ssd:
        pathlib.Path(place).mkdir(parents=True, exist_ok=True)
    return attach_engine(
        model,
        optimizer,
        ssd=list(ssd),
        ram_bytes=offload.ram or 64 * MIB,
        gpu_bytes=offload.gpu or 64 * MIB,
        machine=small_machine(len(ssd)),
        device=offload.device or "cpu",
        num_threads=1,
        is_tracing=offload.is_tracing,
        **kwargs,
    )
