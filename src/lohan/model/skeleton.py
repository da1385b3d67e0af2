"""A copy of a module with fake tensors in place of its weights, for tracing.

Owns making the copy; the user's module and its weights are only looked at. The copy shares settings
with the original, keeps tied weights tied, and runs in no memory to speak of. Imports torch.
"""

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan.errors import ConfigError

CONTAINERS = (list, dict, OrderedDict, set, deque)
"""Types of containers that a module may keep and change; what is derived from them has rules of
its own (a configuration that is frozen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """The copy, and how to get from the original to it.

    Attributes:
        module: the copy of the whole model.
        copy_of: the copy of a submodule, by the id of the original.
        fake_of: the fake parameter, by the id of the original parameter.
    """

    module: nn.Module
    copy_of: dict[int, nn.Module]
    fake_of: dict[int, nn.Parameter]


def make_skeleton(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    alike: dict[int, nn.Module],
) -> Skeleton:
    """Copy a module; call under a fake tensor mode. Floating tensors take on `dtype`.

    Args:
        model: what to copy.
        dtype: of the copy's weights and floating buffers.
        device: which device the copy's tensors claim to be on.
        alike: by the id of a block, an earlier block of the same structure whose parts its copy
            uses; hundreds of equal blocks then cost as much as one.

    Raises:
        ConfigError: for a compiled or scripted module, which has no parts to copy.
    """
    if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
        raise ConfigError(
            f"{type(model).__name__} is a compiled module",
            why="its blocks cannot be traced one by one",
            remedy="pass the module as it was before torch.compile or torch.jit.script",
        )
    fake_of: dict[int, nn.Parameter] = {}
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            kept = dtype if tensor.is_floating_point() else tensor.dtype
            fakes[id(tensor)] = torch.empty(tuple(tensor.shape), dtype=kept, device=device)
        return fakes[id(tensor)]

    def fake_parameter(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in fake_of:
            trained = parameter.requires_grad
            fake_of[id(parameter)] = nn.Parameter(fake(parameter), requires_grad=trained)
        return fake_of[id(parameter)]

    copy_of: dict[int, nn.Module] = {}
    containers: dict[int, Any] = {}
    originals = list(_modules(model, alike, set()))
    for original in originals:
        # Not `copy.copy`: a module with parametrizations refuses to be pickled, which that asks.
        copied = object.__new__(type(original))
        slots = vars(copied)
        slots.update(vars(original))
        slots.pop("forward", None)  # An instance's own forward would run the original.
        for name, value in list(slots.items()):
            if isinstance(value, torch.Tensor):
                slots[name] = fake(value)
            elif type(value) in CONTAINERS:
                # What a forward puts into one is fake. Nor need a hook that the original gets
                # later run on fake tensors.
                slots[name] = containers.setdefault(id(value), copy.copy(value))
        slots["_parameters"] = {
            name: None if parameter is None else fake_parameter(parameter)
            for name, parameter in alike.get(id(original), original)._parameters.items()
        }
        slots["_buffers"] = {
            name: None if buffer is None else fake(buffer)
            for name, buffer in alike.get(id(original), original)._buffers.items()
        }
        if "gradient_checkpointing" in slots:
            # What is recomputed is the planner's choice, so the whole block must be seen.
            slots["gradient_checkpointing"] = False
        copy_of[id(original)] = copied
    for original in originals:
        vars(copy_of[id(original)])["_modules"] = {
            name: None if child is None else copy_of[id(child)]
            for name, child in alike.get(id(original), original)._modules.items()
        }
    return Skeleton(module=copy_of[id(model)], copy_of=copy_of, fake_of=fake_of)


def _modules(module: nn.Module, alike: dict[int, nn.Module], seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    yield module
    for child in module.children() if id(module) not in alike else ():
        yield from _modules(child, alike, seen)


def replace_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Make a copied module run `around(forward, *args, **kwargs)` instead of its class's forward.

    Replacing it again takes the place of the first replacement.
    """
    forward = type(module).forward.__get__(module)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    replaced.__wrapped__ = forward  # type: ignore[attr-defined]  # inspect.signature follows it
    vars(module)["forward"] = replaced
