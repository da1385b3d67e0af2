"""A copy of a module with fake tensors in place of its weights, for tracing.

Owns making the copy; the user's module and its weights are only looked at. Nothing that may change
is shared with the original, whatever a forward keeps it in. The copy keeps tied weights tied, and
runs in no memory to speak of. Imports torch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.model.tracing.object_copies import ObjectCopies

_OWN_PLACES = ("_parameters", "_buffers", "_modules")


class Skeleton:
    """The copy, and how to get from the original to it; make it under a fake tensor mode.

    Args:
        model: what to copy.
        dtype: of the copy's weights, floating buffers and tensors in attributes.
        device: which device the copy's tensors claim to be on.
        alike: by the id of a block, an earlier block of the same structure whose parts its copy
            uses; hundreds of equal blocks then cost as much as one.

    Attributes:
        module: the copy of the whole model.
        copy_of: the copy of a submodule, by the id of the original.
        fake_of: the fake parameter, by the id of the original parameter.

    Raises:
        ConfigError: for a compiled or scripted module, which has no parts to copy.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        alike: dict[int, nn.Module],
    ) -> None:
        if isinstance(model, torch.jit.ScriptModule) or hasattr(model, "_orig_mod"):
            raise ConfigError(
                f"{type(model).__name__} is a compiled module",
                why="its blocks cannot be traced one by one",
                remedy="pass the module as it was before torch.compile or torch.jit.script",
            )
        self._device = device
        self.fake_of: dict[int, nn.Parameter] = {}
        self.copy_of: dict[int, nn.Module] = {}
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._copies = ObjectCopies(self._fake, self._copied_module)
        originals = list(_modules(model, alike, set()))
        for original in originals:
            self.copy_of[id(original)] = _blank(original)
        inside = dict(self.copy_of)
        for original in originals:
            if id(original) in alike:
                for name, part in alike[id(original)].named_modules():
                    stands_for = original.get_submodule(name)
                    self.copy_of.setdefault(id(stands_for), self.copy_of[id(part)])
        for original in originals:
            like, slots = alike.get(id(original), original), vars(inside[id(original)])
            slots["_parameters"] = {
                name: None if one is None else self._fake_parameter(one, dtype)
                for name, one in like._parameters.items()
            }
            slots["_buffers"] = {
                name: None if one is None else self._fake(one, dtype)
                for name, one in like._buffers.items()
            }
            slots["_modules"] = {
                name: None if child is None else inside[id(child)]
                for name, child in like._modules.items()
            }
            for one in vars(original).values():
                if isinstance(one, torch.Tensor):
                    self._fake(one, dtype)
        for original in originals:
            self._copy_attributes(original, inside[id(original)])
        self.module = self.copy_of[id(model)]

    def copied(self, value: Any) -> Any:
        """The copy of something that may hold the model, or parts of it (a loss function)."""
        return self._copies.of(value)

    def others(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors of the model that are no parameters, each with its fake."""
        for original, made in self._fakes.values():
            if not isinstance(original, nn.Parameter):
                yield original, made

    def tensors(self) -> Iterator[torch.Tensor]:
        """All fakes that stand for a tensor of the model."""
        for _, made in self._fakes.values():
            yield made

    def _fake(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What was not met in a place of the model's own keeps its type: no cast reaches it."""
        if id(tensor) in self.fake_of:
            return self.fake_of[id(tensor)]
        if id(tensor) not in self._fakes:
            kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            made = torch.empty(tuple(tensor.shape), dtype=kept, device=self._device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            elif tensor.is_leaf:
                made.requires_grad_(tensor.requires_grad)
            self._fakes[id(tensor)] = (tensor, made)
        return self._fakes[id(tensor)][1]

    def _fake_parameter(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        made: Any = self._fake(parameter, dtype)
        return self.fake_of.setdefault(id(parameter), made)

    def _copied_module(self, module: nn.Module) -> nn.Module:
        """Also of one that is no part of the model: in a list, behind a closure."""
        if id(module) not in self.copy_of:
            copied = self.copy_of[id(module)] = _blank(module)
            vars(copied).update((name, self._copies.of(vars(module)[name])) for name in _OWN_PLACES)
            self._copy_attributes(module, copied)
        return self.copy_of[id(module)]

    def _copy_attributes(self, original: nn.Module, copied: nn.Module) -> None:
        slots = vars(copied)
        for name, value in vars(original).items():
            # An instance's own forward would run the original.
            if name not in _OWN_PLACES and name != "forward":
                slots[name] = self._copies.of(value)
        if "gradient_checkpointing" in slots:
            # What is recomputed is the planner's choice, so the whole block must be seen.
            slots["gradient_checkpointing"] = False


def _blank(module: nn.Module) -> nn.Module:
    # Not `copy.copy`: a module with parametrizations refuses to be pickled, which that asks.
    copied: nn.Module = object.__new__(type(module))
    return copied


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
