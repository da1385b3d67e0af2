"""Toy models on the engine and in a plain loop, with something changed between the steps."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.drive import LossFunction
from lohan.engine.attach import attach_engine
from lohan.engine.engine import Engine
from lohan.engine.options import Options
from lohan.optimizer.torch_optimizer import AdamW
from lohan.store import StateLayout
from lohan.vocabulary import Choice
from support.engine_runs import EngineCase, forced
from support.in_memory_training import plain_end
from support.small_machines import small_machine
from support.toy_models import toy_batches

MIB = 1 << 20

Change = Callable[[int, nn.Module, AdamW], None]
"""What is done to model and optimizer before a step, counted from 0."""


def nothing_changes(step: int, model: nn.Module, optimizer: AdamW) -> None:
    """Every step is as the one before."""


@dataclass
class ToyRun:
    """What a run left behind."""

    losses: list[list[float]]
    masters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def toy_steps(num_steps: int = 3, num_micro_batches: int = 2) -> list[list[dict[str, Any]]]:
    """Batches for `Toy`, in bf16."""
    batches = [
        {name: values.bfloat16() for name, values in batch.items()}
        for batch in toy_batches(num_steps * num_micro_batches)
    ]
    return [
        batches[first : first + num_micro_batches]
        for first in range(0, len(batches), num_micro_batches)
    ]


def toy_optimizer(model: nn.Module, max_grad_norm: float | None = 1.0) -> AdamW:
    """Matrices decay, the rest does not and learns faster."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 6e-3},
    ]
    return AdamW(groups, lr=3e-3, max_grad_norm=max_grad_norm)


def attach_toy(
    model: nn.Module,
    optimizer: AdamW,
    directory: Path,
    *,
    example: Any = None,
    device: str = "cpu",
    loss_fn: LossFunction | None = None,
    progress: Callable[[str], None] | None = None,
    choice: Choice | None = None,
) -> Engine:
    """An engine with room for everything; `choice`: of all outputs, else as the policy chooses."""
    return attach_engine(
        model,
        optimizer,
        Options(
            ssd=[directory],
            ram_bytes=64 * MIB,
            gpu_bytes=64 * MIB,
            machine=small_machine(),
            num_threads=1,
            example=toy_steps(1, 1)[0][0] if example is None else example,
            loss_fn=loss_fn,
            device=device,
            progress=progress,
            policy=forced(EngineCase(choice=choice)),
        ),
    )


def make_toy(make: Callable[[], nn.Module]) -> nn.Module:
    """A toy in bf16, the same for every call."""
    torch.manual_seed(1)
    model = make().train()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def run_toy(
    make: Callable[[], nn.Module],
    directory: Path,
    *,
    steps: Sequence[Sequence[Any]] | None = None,
    change: Change = nothing_changes,
    device: str = "cpu",
    max_grad_norm: float | None = 1.0,
    loss_fn: LossFunction | None = None,
    after_step: Callable[[Engine], None] | None = None,
    choice: Choice | None = None,
) -> tuple[ToyRun, ToyRun]:
    """The same training on the engine and in memory."""
    steps = toy_steps() if steps is None else steps
    model = make_toy(make)
    twin = copy.deepcopy(model)
    optimizer = toy_optimizer(model, max_grad_norm)
    losses = []
    with attach_toy(
        model,
        optimizer,
        directory,
        example=steps[0][0],
        device=device,
        loss_fn=loss_fn,
        choice=choice,
    ) as engine:
        layout = engine.store.layout
        torch.manual_seed(5)
        for number, batches in enumerate(steps):
            change(number, model, optimizer)
            losses.append(list(engine.step(batches).losses))
            if after_step is not None:
                after_step(engine)
        ours = ToyRun(
            losses=losses,
            masters={name: master.clone() for name, master in engine.weights()},
            buffers=dict(model.named_buffers()),
        )
        engine.close(should_delete=True)
    torch.manual_seed(5)
    return ours, _in_memory(twin, steps, change, layout, max_grad_norm, loss_fn)


def _in_memory(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    change: Change,
    layout: StateLayout,
    max_grad_norm: float | None,
    loss_fn: LossFunction | None,
) -> ToyRun:
    optimizer = toy_optimizer(model, max_grad_norm)
    run = plain_end(
        model,
        optimizer,
        steps,
        layout=layout,
        loss_fn=loss_fn,
        before_step=lambda number: change(number, model, optimizer),
    )
    stored = {name: p.detach().float() for name, p in model.named_parameters()}
    return ToyRun(
        losses=run.losses,
        masters={**stored, **run.masters},
        buffers=dict(model.named_buffers()),
    )


def assert_same_toys(ours: ToyRun, plain: ToyRun) -> None:
    """Equal in every bit."""
    assert ours.losses == plain.losses
    different = [
        name
        for name, master in plain.masters.items()
        if not torch.equal(ours.masters[name].view(torch.int32), master.view(torch.int32))
    ]
    different += [
        name
        for name, buffer in plain.buffers.items()
        if not torch.equal(ours.buffers[name], buffer)
    ]
    assert not different, different
