"""`lohan.AdamW`: what schedulers and trainers see of the optimizer.

A real `torch.optim.Optimizer` with parameter groups; the engine reads them at every step and does
the arithmetic itself (`adamw`), so `step` and `state` are not here. Owns the check of settings.
"""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch

from lohan.errors import ConfigError
from lohan.optimizer.settings import AdamWSettings

_DEFAULT_LR = 1e-3


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, fp32 states, and exact global-norm clipping.

    Give it to `lohan.attach` and call `Engine.step`; learning-rate schedulers work on its
    `param_groups` as on any optimizer's.

    Args:
        params: parameters, or groups of them with their own lr, weight_decay, betas or eps.
        max_grad_norm: gradients are scaled down to this global norm; None or infinity: never.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = _DEFAULT_LR,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.rates()

    def rates(self) -> list[AdamWSettings]:
        """Settings of every group as they are now.

        Raises:
            ConfigError: a number is not valid.
        """
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"max_grad_norm is {self.max_grad_norm!r}",
                why="gradients cannot be scaled to a norm of zero or less",
                remedy="give a number above 0, or None for no clipping",
            )
        return [
            AdamWSettings(
                lr=_number(group["lr"]),
                weight_decay=_number(group["weight_decay"]),
                beta1=_number(group["betas"][0]),
                beta2=_number(group["betas"][1]),
                eps=_number(group["eps"]),
            )
            for group in self.param_groups
        ]

    def group_of(self) -> dict[int, int]:
        """Index of the group of every parameter, by its `id`."""
        return {
            id(parameter): index
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Refuse: states live with the engine.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "lohan.AdamW.step was called",
            why="weights and states are with the engine, which updates them in `Engine.step`",
            remedy="call `engine.step(micro_batches)` in place of backward and optimizer.step",
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the settings of groups; moments are the engine's.

        Raises:
            ConfigError: there are moments in it, which would be without effect.
        """
        if state_dict.get("state"):
            raise ConfigError(
                f"moments of {len(state_dict['state'])} parameters were given to lohan.AdamW",
                why="states live with the engine, and these would be without effect",
                remedy="pass them to `lohan.attach` as moments=",
            )
        super().load_state_dict(state_dict)

    def note_step(self) -> None:
        """The engine has taken a step: schedulers warn when they are asked to go on before one."""
        vars(self)["_opt_called"] = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}


def clip_scale(norm: float, max_grad_norm: float | None) -> float:
    """What gradients of a global norm are multiplied by; as `clip_grad_norm_` defines it."""
    if max_grad_norm is None:
        return 1.0
    return min(1.0, max_grad_norm / (norm + 1e-6))


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else value
