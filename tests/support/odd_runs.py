"""Runs of the engine with batches, losses or models of a test's own, and the same in memory."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lohan.engine.attach import attach_engine
from lohan.engine.engine import Engine
from lohan.engine.options import FirstStates, Options
from lohan.optimizer.torch_optimizer import AdamW
from support.engine_faults import States
from support.engine_runs import FIRST_NAMES, EngineCase, forced, optimizer_for
from support.in_memory_training import PlainRun, plain_end
from support.small_machines import small_machine

Batch = dict[str, Any]


def start(
    case: EngineCase,
    model: torch.nn.Module,
    optimizer: AdamW,
    directory: Path,
    example: Any,
    **options: Any,
) -> Engine:
    place = directory / "ssd0"
    place.mkdir(exist_ok=True)
    first = FirstStates(**{name: options.pop(name) for name in FIRST_NAMES if name in options})
    return attach_engine(
        model,
        optimizer,
        Options(
            ssd=[place],
            ram_bytes=case.ram_bytes,
            gpu_bytes=case.gpu_bytes,
            machine=small_machine(1),
            device=case.device,
            policy=forced(case),
            num_threads=1,
            example=example,
            **options,
        ),
        first,
    )


def plain(
    case: EngineCase,
    engine: Engine,
    model: torch.nn.Module,
    steps: Sequence[Sequence[Any]],
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
    loss_scale: float | None = None,
    weights: Callable[[Sequence[Any]], Sequence[float]] | None = None,
) -> PlainRun:
    """On the engine's device: what is drawn there comes from its own generator."""
    if loss_scale is None and case.dtype is torch.float16:
        loss_scale = 2.0**16
    target = engine.device.torch_device
    model.to(target)
    return plain_end(
        model,
        optimizer_for(case, model),
        tree_map_only(torch.Tensor, lambda leaf: leaf.to(target), list(steps)),
        layout=engine.store.layout,
        shares_of=weights,
        loss_fn=loss_fn,
        loss_scale=loss_scale,
    )


def states_in_memory(run: PlainRun) -> States:
    return {
        name: (master, run.first[name], run.second[name]) for name, master in run.masters.items()
    }
