"""The one place where a trainer meets the engine. Nothing is decided here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

import lohan
from lohan.runtime.planning import PlannedRun
from lohan.runtime.write_limit import WriteLimit
from lohan.train.offload import OffloadConfig

Moments = Callable[[str], tuple[torch.Tensor, torch.Tensor]]


def attach_engine(
    model: Any,
    optimizer: Any,
    *,
    offload: OffloadConfig,
    ssd: Sequence[str],
    run: str | None,
    largest_step: Sequence[Any] | None,
    write_limit: WriteLimit | None,
    progress: Callable[[str], None] | None,
    on_planned: Callable[[PlannedRun], None] | None = None,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
    moments: Moments | None = None,
    counters: Mapping[str, Any] | None = None,
    buffers: Mapping[str, Any] | None = None,
) -> Any:
    """Attach the engine to a model; see `lohan.attach`."""
    return lohan.attach(
        model,
        optimizer,
        ssd=list(ssd),
        ram=offload.ram,
        gpu=offload.gpu,
        device=offload.device,
        machine=offload.machine,
        ssd_rated_bytes=offload.ssd_rated_bytes,
        weights=weights,
        moments=moments,
        counters=counters,
        buffers=buffers,
        run=run,
        largest_step=largest_step,
        write_limit=write_limit,
        progress=progress,
        on_planned=on_planned,
        is_tracing=offload.is_tracing,
    )
