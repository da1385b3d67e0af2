"""The optimizer object a trainer holds: its groups are read by the engine, its step is done there.

Owns that one difference to `lohan.AdamW`: transformers calls `step` after each window, when the
engine has taken the step already. Made by the trainer.
"""

from typing import Any

from lohan.optimizer.torch_optimizer import AdamW


class SteppedByEngine(AdamW):
    """AdamW whose step was taken by `engine.step`."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is left to be done."""


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
