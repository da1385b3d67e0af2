"""The judge: the same training in memory, by an ordinary loop of PyTorch and a slow AdamW.

Owns the arithmetic a run must reproduce: 16-bit weights compute, gradients add up as `backward`
leaves them, fp32 masters and moments are updated one operation at a time (`optimizer.reference`).
Nothing is moved, overlapped or recomputed here. Of the engine it knows only the order in which
gradients lie for the global norm, which decides how their squares are added. Called by `compare`.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from lohan.drive.micro_batch import loss_of
from lohan.drive.surroundings.randomness import Generators
from lohan.engine.planning.label_watch import IGNORED_LABEL
from lohan.optimizer import combine_leaf_sums, num_leaves, reference, sum_of_squares
from lohan.optimizer.settings import StepScalars, prepare_step
from lohan.optimizer.torch_optimizer import AdamW, clip_scale
from lohan.store import StateLayout
from lohan.verify.small_copy import Loss

_MOST_LABELS = 8
"""Tried to see whether they count: 16-bit losses of two of them may be equal by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStates:
    """What a run keeps of one parameter, on the CPU."""

    master: torch.Tensor
    first_moment: torch.Tensor
    second_moment: torch.Tensor

    def copied(self) -> "TensorStates":
        """The same values in memory of their own."""
        return TensorStates(
            master=self.master.clone(),
            first_moment=self.first_moment.clone(),
            second_moment=self.second_moment.clone(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step gave, in memory or offloaded."""

    losses: tuple[float, ...]
    grad_norm: float | None
    """None where nothing is clipped or scaled: a run does not compute it then."""


@dataclass(slots=True, kw_only=True)
class Trained:
    """A run: what every step gave, and the states after steps that were looked at."""

    steps: list[StepOutcome] = field(default_factory=list)
    states: dict[int, dict[str, TensorStates]] = field(default_factory=dict)
    """By number of steps taken, and name."""


def train_in_memory(
    model: nn.Module,
    optimizer: AdamW,
    steps: Sequence[Sequence[Mapping[str, Any]]],
    *,
    layout: StateLayout,
    loss_fn: Loss | None,
    shares_of: Callable[[Sequence[Any]], Sequence[float]] | None = None,
    before_step: Callable[[int], None] | None = None,
    loss_scale: float | None = None,
    reduction_groups: int = 1,
) -> Trained:
    """Train on every step's micro-batches; the states after every step are kept.

    Args:
        optimizer: over the model's parameters; its settings are read, it does nothing.
        layout: how gradients lie, block by block, for the norm.
        shares_of: weights of a step's losses; without it those of `loss_shares`.
        before_step: called with the number of steps taken; may change model and optimizer.
        loss_scale: the first one, of dynamic scaling; a step that overflows is left out and
            halves it.
        reduction_groups: the step's micro-batches are dealt to so many, in turn; each adds up by
            itself, with random numbers of its own, and their sums are added in fp32.
    """
    untrained = copy.deepcopy(model) if shares_of is None else model
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    states = {name: _first_states(parameter) for name, parameter in named.items()}
    num_updates = dict.fromkeys(named, 0)
    run = Trained()
    run.states[0] = {name: one.copied() for name, one in states.items()}
    for batches in steps:
        if before_step is not None:
            before_step(len(run.steps))
        groups, rates = optimizer.group_of(), optimizer.rates()
        shares = shares_of(batches) if shares_of else loss_shares(untrained, batches, loss_fn)
        scale = loss_scale or 1.0
        scaled, found = _of_groups(
            model,
            batches,
            loss_fn,
            [share * scale for share in shares],
            num_groups=reduction_groups,
            step=len(run.steps) + 1,
        )
        losses = [float(loss) / scale for loss in scaled]
        gradients = {name: one.reshape(-1).cpu() for name, one in found.items() if name in named}
        norm = _global_norm(gradients, layout) / scale
        knows_norm = optimizer.max_grad_norm is not None or loss_scale is not None
        run.steps.append(StepOutcome(losses=tuple(losses), grad_norm=norm if knows_norm else None))
        if loss_scale is not None and not math.isfinite(norm):
            loss_scale /= 2
            gradients = {}
        for name, gradient in gradients.items():
            num_updates[name] += 1
            scalars = prepare_step(
                rates[groups[id(named[name])]],
                step=num_updates[name],
                num_elements=gradient.numel(),
                grad_scale=clip_scale(norm, optimizer.max_grad_norm) / scale,
            )
            _update(named[name], gradient, states[name], scalars)
        run.states[len(run.steps)] = {name: one.copied() for name, one in states.items()}
    return run


def _of_groups(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: Loss | None,
    shares: Sequence[float],
    *,
    num_groups: int,
    step: int,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and gradients of micro-batches dealt to groups in turn."""
    if num_groups == 1:
        return losses_and_gradients(model, batches, loss_fn, shares)
    generators = Generators([next(model.parameters()).device])
    begin = after = generators.state()
    losses: list[torch.Tensor] = [torch.empty(0)] * len(batches)
    sums: dict[str, torch.Tensor] = {}
    for group in range(min(num_groups, len(batches))):
        own = slice(group, None, num_groups)
        generators.set_state(generators.state_of_group(begin, group, step))
        found, gradients = losses_and_gradients(model, batches[own], loss_fn, shares[own])
        after = generators.state() if group == 0 else after
        losses[own] = found
        for name, gradient in gradients.items():
            sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()
    generators.set_state(after)
    return losses, sums


def losses_and_gradients(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: Loss | None = None,
    shares: Sequence[float] | None = None,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """`backward` once per micro-batch: the losses times their shares, and all gradients by name.

    A parameter that took no part in the loss has no gradient and is not in them.
    """
    model.zero_grad(set_to_none=True)
    losses = []
    for batch, share in zip(batches, shares or [1.0] * len(batches), strict=True):
        loss = loss_of(model, batch, loss_fn)
        loss = loss if share == 1.0 else loss * share
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return losses, gradients


def loss_shares(
    model: nn.Module, batches: Sequence[Mapping[str, Any]], loss_fn: Loss | None
) -> list[float]:
    """Each micro-batch's share of the labels that count, or equal shares without labels."""
    if any(batch.get("labels") is None for batch in batches):
        return [1.0 / len(batches)] * len(batches)
    with_first, without = (_shares([b["labels"][..., begin:] for b in batches]) for begin in (0, 1))
    if with_first == without:
        return with_first
    return with_first if _counts_first_label(model, batches[0], loss_fn) else without


def _shares(labels: Sequence[torch.Tensor]) -> list[float]:
    counts = [int((one != IGNORED_LABEL).sum()) for one in labels]
    return [count / max(1, sum(counts)) for count in counts]


def _counts_first_label(model: nn.Module, batch: Mapping[str, Any], loss_fn: Loss | None) -> bool:
    """By experiment: whether labels of first tokens make a difference beside those of last ones.

    Never of no label at all: models that look for the end of each row (mBART) have none then.
    """
    labels = batch["labels"]
    if labels.dim() < 2 or labels.shape[-1] < 2 or labels.is_floating_point():
        return True
    last = torch.full_like(labels, IGNORED_LABEL)
    last[..., -1] = labels[..., -1].clamp(min=0)
    tries = [last]
    for label in labels[labels >= 0].unique()[:_MOST_LABELS]:
        tries.append(last.clone())
        tries[-1][..., 0] = label
    # A copy: a forward may change its model, and this one is no part of the training.
    tried = copy.deepcopy(model).eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        losses = (float(loss_of(tried, {**batch, "labels": one}, loss_fn)) for one in tries)
        first = next(losses)
        return any(loss != first for loss in losses)


def _first_states(parameter: nn.Parameter) -> TensorStates:
    master = parameter.detach().cpu().to(torch.float32, copy=True).contiguous()
    return TensorStates(
        master=master,
        first_moment=torch.zeros_like(master),
        second_moment=torch.zeros_like(master),
    )


@torch.no_grad()
def _update(
    parameter: nn.Parameter, gradient: torch.Tensor, states: TensorStates, scalars: StepScalars
) -> None:
    p, m, v = (
        state.view(-1) for state in (states.master, states.first_moment, states.second_moment)
    )
    updated = reference.adamw_elements(reference.widened(gradient), p, m, v, scalars)
    for state, values in zip((p, m, v), updated, strict=True):
        state.copy_(values)
    parameter.copy_(states.master.to(parameter.dtype))


def _global_norm(gradients: Mapping[str, torch.Tensor], layout: StateLayout) -> float:
    """Root of the sum of all squares: sums of leaves of each block's flat gradient, as a tree."""
    sums = []
    for block in layout.blocks:
        trained = [place for place in block.places if place.entry.is_trainable]
        if not trained:
            continue
        kinds = {one.dtype for one in gradients.values()}
        flat = torch.zeros(block.num_trainable, dtype=kinds.pop() if kinds else torch.bfloat16)
        for place in trained:
            if place.entry.name in gradients:
                flat[place.begin : place.end] = gradients[place.entry.name]
        leaves = np.zeros(num_leaves(len(flat)))
        sum_of_squares(flat, leaves)
        sums.append(leaves)
    return math.sqrt(combine_leaf_sums(np.concatenate(sums)))
