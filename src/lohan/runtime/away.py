"""A model whose weights are away: how to tell, and no computing with or saving what stands in.

Engines leave one NaN, spread over its shape, in place of each parameter. Whoever calls the model
between steps, generates with it or saves it would get NaNs without a word. Owns the hooks that say
so instead; they stay with the model, since its weights do not come back by themselves. Called by
`run_setup` when weights leave, and by `segments.step` around its own calls.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from lohan.errors import ConfigError


def is_away(parameter: torch.Tensor) -> bool:
    """Whether it is what engines leave in place of a parameter."""
    is_one = parameter.numel() > 1 and not parameter.is_meta and not any(parameter.stride())
    return is_one and bool(parameter.detach().flatten()[0].isnan())


_OPEN: set[int] = set()
"""Modules of models that are in a step, by identity. Not kept in the hooks: copies of a model and
models around it have these too."""


def refuse_calls(model: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> None:
    """From now on, calling the model or a block of it while weights are away is an error, and so
    is saving it."""
    for module in (model, *blocks):
        if _before_forward not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_before_forward, prepend=True)
    if _before_state_dict not in model._state_dict_pre_hooks.values():
        model.register_state_dict_pre_hook(_before_state_dict)


@contextlib.contextmanager
def calls_allowed(model: torch.nn.Module) -> Iterator[None]:
    """Weights come in time: the model may be called, on any thread."""
    opened = {id(module) for module in model.modules()} - _OPEN
    _OPEN.update(opened)
    try:
        yield
    finally:
        _OPEN.difference_update(opened)


def _before_forward(module: torch.nn.Module, _args: Any) -> None:
    if id(module) not in _OPEN:
        _refuse_away(module, f"{type(module).__name__} was called outside of a step")


def _before_state_dict(module: torch.nn.Module, _prefix: str, _keep_vars: bool) -> None:
    _refuse_away(module, f"the state of {type(module).__name__} was asked for")


def _refuse_away(module: torch.nn.Module, what: str) -> None:
    away = next((name for name, own in module.named_parameters() if is_away(own)), None)
    if away is not None:
        raise ConfigError(
            f"{what}, but its weights are away, {away} the first",
            why="lohan holds them on SSD and brings each block only while a step or an evaluation "
            "needs it; in their place are NaNs",
            remedy="compute with engine.evaluate() (trainer.evaluate(), trainer.predict()); save "
            "with trainer.save_model() or lohan export and load that model to generate; or read "
            "the weights from engine.weights()",
        )
