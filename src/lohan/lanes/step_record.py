"""What one optimizer step needs to know while it is under way, and what it finds out.

Made by the engine when a step begins, filled in by lanes (gradients, norm), read by updates, which
may run during the next step. Owns no memory but the leaf sums of the norm.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lohan.errors import ConfigError, NonFiniteGradients
from lohan.optimizer import AdamWSettings, UpdateRange, combine_leaf_sums
from lohan.optimizer.torch_optimizer import AdamW, clip_scale
from lohan.schedule.task import Move, Task
from lohan.store import StateLayout
from lohan.vocabulary import BlockId, ComputeKind, TensorKind, Tier

KernelCall = tuple[AdamWSettings, int, list[UpdateRange]]
"""Settings, the step for bias correction, and ranges with their rates."""


class Counted(Protocol):
    """How many steps and updates there were."""

    num_steps: int
    num_updates: int
    missed: dict[str, int]


class NonFinitePolicy(StrEnum):
    """What happens when gradients contain infinities or NaNs."""

    STOP = "stop"
    """The step fails with an error that names the block; the last seal is intact. Where nothing
    waits for the norm each gradient is judged before its own update, not before those of others:
    waiting for all would give up the overlap, and the step is lost either way."""
    SKIP = "skip"
    """Weights and states stay exactly as they are, and training goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRates:
    """How one tensor is updated in a step."""

    name: str
    begin: int
    end: int
    """Positions, padding behind it included: zeros that an update leaves zero."""
    group: int
    step: int
    """Updates it has had, this one included."""


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step. Lanes fill in different blocks; the norm task sees all of them."""

    number: int
    """Counts from 1."""
    rates: Sequence[AdamWSettings]
    tensors: Mapping[BlockId, Sequence[TensorRates]]
    max_grad_norm: float | None
    waits_for_norm: bool
    policy: NonFinitePolicy
    trained: Mapping[BlockId, Sequence[str]]
    """Names of all trainable tensors, also where another rank updates them."""
    loss_scale: float | None = None
    leaf_sums: dict[BlockId, npt.NDArray[np.float64]] = field(default_factory=dict)
    num_nonfinite: dict[BlockId, int] = field(default_factory=dict)
    missing: dict[BlockId, frozenset[str]] = field(default_factory=dict)
    updated: set[BlockId] = field(default_factory=set)
    """Blocks whose update has begun."""
    is_skipped: bool = False
    grad_norm: float | None = None
    grad_scale: float = 1.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def begin(
        cls,
        layout: StateLayout,
        whole: StateLayout,
        *,
        groups: Mapping[str, int],
        counters: "Counted",
        rates: Sequence[AdamWSettings],
        max_grad_norm: float | None,
        waits_for_norm: bool,
        policy: NonFinitePolicy,
        loss_scale: float | None,
    ) -> "StepRecord":
        """The record of the next step; `layout` is of what this rank updates."""
        count = counters.num_updates + 1
        steps = {name: count - counters.missed.get(name, 0) for name in layout.names}
        return cls(
            number=counters.num_steps + 1,
            rates=rates,
            tensors=tensor_rates(layout, groups, steps),
            max_grad_norm=max_grad_norm,
            waits_for_norm=waits_for_norm,
            policy=policy,
            trained={
                BlockId(number): [entry.name for entry in block.tensors if entry.is_trainable]
                for number, block in enumerate(whole.blocks)
            },
            loss_scale=loss_scale,
        )

    def add_sums(
        self, block: BlockId, leaf_sums: npt.NDArray[np.float64], first: int, num_nonfinite: int
    ) -> None:
        """Leaf sums of a piece of a block's gradient, from leaf `first` on."""
        with self.lock:
            self.leaf_sums[block][first : first + len(leaf_sums)] = leaf_sums
            self.num_nonfinite[block] = self.num_nonfinite.get(block, 0) + num_nonfinite

    def finish_norm(self, names: Mapping[BlockId, str]) -> None:
        """Every gradient is there: the norm, and what gradients are multiplied by.

        Raises:
            NonFiniteGradients: some are infinite or NaN, and the policy is to stop.
        """
        sums = [self.leaf_sums[block] for block in sorted(self.leaf_sums)]
        total = combine_leaf_sums(np.concatenate(sums)) if sums else 0.0
        inverse = 1.0 / (self.loss_scale or 1.0)
        self.grad_norm = math.sqrt(total) * inverse if total >= 0 else math.nan
        bad = {block: count for block, count in self.num_nonfinite.items() if count}
        if bad or not math.isfinite(self.grad_norm):
            is_overflow = self.loss_scale is not None
            if self.policy is NonFinitePolicy.STOP and not is_overflow:
                raise nonfinite_error(self.number, bad, names)
            self.is_skipped = True
            return
        self.grad_scale = inverse * clip_scale(self.grad_norm, self.max_grad_norm)

    def updated_so_far(self, names: Mapping[BlockId, str]) -> str:
        """Of a step that failed: which blocks' states in work are of it."""
        blocks = [names[block] for block in sorted(self.updated)]
        if not blocks:
            return f"no block was updated in step {self.number}"
        return (
            f"without clipping updates run as gradients arrive: in step {self.number} "
            f"{len(blocks)} of {len(self.tensors)} blocks were updated before this was found, with "
            f"finite gradients only: {', '.join(blocks)}"
        )

    def calls(self, block: BlockId, begin: int, end: int) -> list[KernelCall]:
        """Kernel calls that update positions [begin, end) of a block."""
        missing = self.missing.get(block, frozenset())
        grouped: dict[tuple[object, int], tuple[AdamWSettings, list[tuple[int, int, int]]]] = {}
        for tensor in self.tensors[block]:
            first, last = max(tensor.begin, begin) - begin, min(tensor.end, end) - begin
            if first >= last or tensor.name in missing:
                continue
            settings = self.rates[tensor.group]
            # Rates go with ranges; a call has one pair of betas, one eps and one step.
            key = ((settings.beta1, settings.beta2, settings.eps), tensor.step)
            _, spans = grouped.setdefault(key, (settings, []))
            if spans and spans[-1][0] == tensor.group and spans[-1][2] == first:
                first = spans.pop()[1]  # neighbours with the same rates are one range
            spans.append((tensor.group, first, last))
        return [
            (settings, step, [self.rates[group].range(*span) for group, *span in spans])
            for (_, step), (settings, spans) in grouped.items()
        ]


def nonfinite_error(
    step: int, bad: Mapping[BlockId, int], names: Mapping[BlockId, str]
) -> NonFiniteGradients:
    """The error for gradients that are not finite."""
    # Backward goes from the last block to the first: the last one named is where it began.
    blocks = sorted(bad)
    where = f"block {names[blocks[-1]]}" if blocks else "the sum of all squares"
    others = f" and in {len(blocks) - 1} earlier blocks" if len(blocks) > 1 else ""
    count = bad[blocks[-1]] if blocks else 0
    return NonFiniteGradients(
        f"in step {step} {count} gradients of {where} are infinite or NaN{others}",
        why="an update with them would spoil every weight they reach",
        remedy="look at the batch and the learning rate of this step, lower the learning rate, or "
        'set nonfinite="skip" to leave such steps out; the last seal is intact',
    )


def looks_at_gradients(task: Task) -> bool:
    """Whether gradients that are not finite may be found by a task: the norm, or, where nothing
    waits for it, each gradient on its way out or, of several groups, their sum."""
    action = task.action
    if isinstance(action, Move):
        return (action.kind, action.source) == (TensorKind.G16, Tier.GPU)
    return action.kind in (ComputeKind.NORM, ComputeKind.REDUCE)


def groups_by_name(model: torch.nn.Module, optimizer: AdamW) -> dict[str, int]:
    """The parameter group of every parameter."""
    group_of = optimizer.group_of()
    return {
        name: group_of[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in group_of
    }


def refuse_replaced(model: torch.nn.Module, attached: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose parameters are not those that were attached.

    Raises:
        ConfigError: naming the first; nothing was changed.
    """
    now = dict(model.named_parameters())
    for name, parameter in attached.items():
        if now.get(name) is not parameter:
            raise ConfigError(
                f"{name} is {'another parameter' if name in now else 'gone'} since the model was "
                "attached",
                why="its weights and states are with the engine, under the one that was there",
                remedy="change the model before it is attached; attach again with weights= to "
                "start from other values",
            )


def tensor_rates(
    layout: StateLayout,
    group_of: Mapping[str, int],
    steps: Mapping[str, int],
) -> dict[BlockId, list[TensorRates]]:
    """Rates of every trainable tensor; `steps` counts this update for each."""
    found: dict[BlockId, list[TensorRates]] = {}
    for number, block in enumerate(layout.blocks):
        places = [place for place in block.places if place.entry.is_trainable]
        ends = [*(place.begin for place in places[1:]), block.num_trainable][: len(places)]
        found[BlockId(number)] = [
            TensorRates(
                name=place.entry.name,
                begin=place.begin,
                end=end,
                group=group_of[place.entry.name],
                step=steps[place.entry.name],
            )
            for place, end in zip(places, ends, strict=True)
        ]
    return found
