"""The judge of the engine: a plain loop in memory, with the project's slow AdamW.

bf16 (or fp16) weights compute; fp32 masters, m and v are plain tensors; gradients are summed as
`backward` leaves them; the norm is the tree of leaf sums over each block's flat gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lohan.drive.micro_batch import loss_of
from lohan.optimizer import combine_leaf_sums, num_leaves, reference, sum_of_squares
from lohan.optimizer.settings import AdamWSettings, prepare_step
from lohan.optimizer.torch_optimizer import clip_scale
from lohan.store import StateLayout


@dataclass
class PlainRun:
    """Masters and moments by name, and what each step gave."""

    masters: dict[str, torch.Tensor]
    first: dict[str, torch.Tensor]
    second: dict[str, torch.Tensor]
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def train_in_memory(
    model: torch.nn.Module,
    steps: Sequence[Sequence[Any]],
    *,
    layout: StateLayout,
    weights: Callable[[Sequence[Any]], Sequence[float]],
    settings_of: Callable[[int, str], AdamWSettings],
    max_grad_norm: float | None,
    loss_fn: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
    loss_scale: float | None = None,
) -> PlainRun:
    """Train every step's micro-batches; `layout` says how gradients lie for the norm.

    `loss_scale`: the first one, of dynamic scaling; a step that overflows is left out and halves
    it.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    run = PlainRun(
        masters={name: p.detach().float().clone() for name, p in named.items()},
        first={name: torch.zeros(p.shape) for name, p in named.items()},
        second={name: torch.zeros(p.shape) for name, p in named.items()},
    )
    counts = dict.fromkeys(named, 0)
    for number, batches in enumerate(steps):
        model.zero_grad(set_to_none=True)
        losses = []
        for batch, weight in zip(batches, weights(batches), strict=True):
            loss = loss_of(model, batch, loss_fn)
            factor = weight * (loss_scale or 1.0)
            loss = loss if factor == 1.0 else loss * factor
            loss.backward()
            losses.append(float(loss.detach()) / (loss_scale or 1.0))
        run.losses.append(losses)
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        inverse = 1.0 / (loss_scale or 1.0)
        norm = global_norm(gradients, layout, next(iter(named.values())).dtype) * inverse
        run.norms.append(norm)
        if loss_scale is not None and not math.isfinite(norm):
            loss_scale /= 2
            continue
        scale = inverse * clip_scale(norm, max_grad_norm)
        with torch.no_grad():
            for name, gradient in gradients.items():
                counts[name] += 1
                states = (run.masters[name], run.first[name], run.second[name])
                scalars = prepare_step(
                    settings_of(number, name),
                    step=counts[name],
                    num_elements=gradient.numel(),
                    grad_scale=scale,
                )
                flat = [state.view(-1) for state in states]
                updated = reference.adamw_elements(
                    reference.widened(gradient.reshape(-1)), *flat, scalars
                )
                for state, values in zip(flat, updated, strict=True):
                    state.copy_(values)
                named[name].copy_(run.masters[name].to(named[name].dtype))
    return run


def global_norm(
    gradients: dict[str, torch.Tensor], layout: StateLayout, dtype: torch.dtype
) -> float:
    """Root of the sum of all squares, added as the engine adds them."""
    sums = []
    for block in layout.blocks:
        flat = torch.zeros(block.num_trainable, dtype=dtype)
        trainable = [place for place in block.places if place.entry.is_trainable]
        for place in trainable:
            if place.entry.name in gradients:
                flat[place.begin : place.end] = gradients[place.entry.name].reshape(-1)
        leaves = np.zeros(num_leaves(len(flat)))
        if trainable:
            sum_of_squares(flat, leaves)
            sums.append(leaves)
    return math.sqrt(combine_leaf_sums(np.concatenate(sums)))
