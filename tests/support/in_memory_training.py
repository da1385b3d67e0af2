"""A run of the judge (`lohan.verify.plain_loop`) as tests look at it: its end, by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lohan.optimizer.torch_optimizer import AdamW
from lohan.verify.plain_loop import train_in_memory


@dataclass(frozen=True)
class PlainRun:
    """Masters and moments by name after the last step, and what each step gave."""

    masters: dict[str, torch.Tensor]
    first: dict[str, torch.Tensor]
    second: dict[str, torch.Tensor]
    losses: list[list[float]]
    norms: list[float | None]


def plain_end(
    model: torch.nn.Module, optimizer: AdamW, steps: Sequence[Sequence[Any]], **options: Any
) -> PlainRun:
    """Train in memory; options as of `train_in_memory`."""
    run = train_in_memory(model, optimizer, steps, **options)
    last = run.states[len(run.steps)]
    return PlainRun(
        masters={name: states.master for name, states in last.items()},
        first={name: states.first_moment for name, states in last.items()},
        second={name: states.second_moment for name, states in last.items()},
        losses=[list(step.losses) for step in run.steps],
        norms=[step.grad_norm for step in run.steps],
    )
