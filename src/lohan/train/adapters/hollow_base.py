"""Adapters on a model whose weights are not loaded: same first values as on one in memory.

Owns the stand-ins. PEFT makes an adapter where the layer it adapts is, so on the meta device it
would have no values. While PEFT works, parameters are therefore views of one zero, which have
shape, type and device and no memory; then they are on meta again. Called by the trainers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_ORIGINAL = ".original_module."


class HollowBase:
    """A base of stand-ins, from before adapters are made until `finish`."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {}
        self._kept: list[nn.Parameter] = []  # an id is of what lives
        named = {id(p): name for name, p in model.named_parameters()}

        def stand_in(parameter: nn.Parameter) -> nn.Parameter:
            zero = torch.zeros((), dtype=parameter.dtype, device="cpu")
            made = nn.Parameter(zero.expand(parameter.shape), parameter.requires_grad)
            self._names[id(made)] = named[id(parameter)]
            self._kept.append(made)
            return made

        _replace(model, lambda parameter: stand_in(parameter) if parameter.is_meta else None)

    def finish(self, model: nn.Module, adapter: str) -> dict[str, tuple[str, ...]]:
        """Take the stand-ins out again, and copies of them that are trained whole.

        Returns:
            For each name of the base the names it has in `model`.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        owners: dict[int, str] = dict(self._names)
        for name, parameter in parameters.items():
            original = name.replace(f".modules_to_save.{adapter}.", _ORIGINAL)
            if original != name:
                owners[id(parameter)] = self._names[id(parameters[original])]
        found: dict[str, list[str]] = {name: [] for name in self._names.values()}
        for name, parameter in model.named_parameters():
            if id(parameter) in owners:
                found[owners[id(parameter)]].append(name)

        def on_meta(parameter: nn.Parameter) -> nn.Parameter | None:
            if id(parameter) not in owners:
                return None
            nothing = torch.empty_like(parameter, device="meta")
            return nn.Parameter(nothing, parameter.requires_grad)

        _replace(model, on_meta)
        self._kept.clear()
        return {name: tuple(names) for name, names in found.items()}


def _replace(model: nn.Module, made_of: Callable[[nn.Parameter], nn.Parameter | None]) -> None:
    """Put others in the place of parameters, one for all modules that share one."""
    made: dict[int, nn.Parameter | None] = {}
    kept = list(model.parameters())  # an id is of what lives
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = made_of(parameter)
            found = made[id(parameter)]
            if found is not None:
                module._parameters[name] = found
    del kept


def renamed(
    tensors: Iterator[tuple[str, torch.Tensor]], names: dict[str, tuple[str, ...]]
) -> Iterator[tuple[str, Any]]:
    """Tensors of a base by the names they have under an adapter; a copied one comes twice."""
    for name, tensor in tensors:
        for own in names[name]:
            yield own, tensor
        del tensor
