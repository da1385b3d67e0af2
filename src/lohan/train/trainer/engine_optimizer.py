"""The optimizer object a trainer holds: its groups are read by the engine, its step is done there.

Owns that one difference to `lohan.AdamW`: transformers calls `step` after each window, when the
engine has taken the step already. Made by the trainer.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from lohan.errors import ConfigError
from lohan.optimizer import AdamWSettings
from lohan.optimizer.torch_optimizer import AdamW


class SteppedByEngine(AdamW):
    """AdamW whose step was taken by `engine.step`."""

    _taken_with: Sequence[AdamWSettings] = ()
    """Settings of the groups in the engine's last step."""

    def note_step(self) -> None:
        """The engine has taken a step, with the groups as they are now."""
        super().note_step()
        self._taken_with = self.rates()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is left to be done.

        Raises:
            ConfigError: a setting was changed after the engine took the step.
        """
        for taken, now in zip(self._taken_with, self.rates(), strict=False):
            for name, value in asdict(now).items():
                before = getattr(taken, name)
                if value != before:
                    raise ConfigError(
                        f"{name} was changed from {before} to {value} after the backward pass",
                        why="the engine updates while it runs backward: this step was taken with "
                        "the value before",
                        remedy="set it before the step, in on_step_begin",
                    )


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Settings of the parameter groups, without the parameters, as JSON takes them."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_groups(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Put settings of parameter groups back."""
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        for name, value in settings.items():
            group[name] = tuple(value) if isinstance(value, list) else value


def groups_of_adamw(optimizers: Any) -> list[dict[str, Any]] | None:
    """The groups of an AdamW that a script made for a trainer; None where it made none.

    Raises:
        ConfigError: it is another optimizer, has taken steps, or comes with a schedule of its own.
    """
    optimizer, schedule = optimizers if optimizers is not None else (None, None)
    if schedule is not None:
        raise ConfigError(
            "optimizers has a schedule",
            why="it would set the rates of an optimizer that is not the engine's",
            remedy="name one with lr_scheduler_type",
        )
    if optimizer is None:
        return None
    kind = type(optimizer)
    odd = [name for name in ("amsgrad", "maximize") if optimizer.defaults.get(name)]
    if not isinstance(optimizer, torch.optim.AdamW | AdamW) or odd or optimizer.state:
        what = f" with {odd[0]}" if odd else " that has taken steps" if optimizer.state else ""
        raise ConfigError(
            f"optimizers has a {kind.__module__}.{kind.__name__}{what}",
            why="the engine runs AdamW, with fp32 states of its own",
            remedy="give a new torch.optim.AdamW over the model's parameters, or leave it out",
        )
    kept = ("params", "lr", "weight_decay", "betas", "eps")
    return [{name: group[name] for name in kept} for group in optimizer.param_groups]
