"""Tensors that a model changes in place outside its blocks: whose value does a micro-batch find?

Micro-batches of a step go side by side, one part of the model after the other. A buffer that one
part changes and another reads would be read with what a later micro-batch left there; in a plain
loop it is read with one's own. Owns finding this out, in the forward that counts random numbers,
where every operator is looked at anyway. What is assigned anew is looked after by `own_attributes`,
buffers of a block by `changing_buffers`. Called by `segmented_model`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.drive.watch.own_attributes import OWN_NAMES
from lohan.errors import ConfigError
from lohan.model.tracing.kept_contents import same_bits
from lohan.model.tracing.trace_ops import storage_key, tensors_in
from lohan.vocabulary import BlockId


class SharedState:
    """The tensors of one model, and which of its parts touch them during one forward."""

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        self._tensors = dict(_outside(model, blocks))
        self._before = {name: tensor.clone() for name, tensor in self._tensors.items()}
        self._parts: dict[str, set[BlockId]] = {name: set() for name in self._tensors}
        names = {storage_key(tensor): name for name, tensor in self._tensors.items()}
        self._names: Mapping[int, str] = names
        self._containers = dict(_containers_outside(model, blocks))
        self._contents = {name: _tensors_of(one) for name, one in self._containers.items()}
        self._changed_in: dict[str, set[BlockId]] = {name: set() for name in self._containers}
        self._part = BlockId(0)

    def begin_part(self, part: BlockId) -> None:
        """Another one is running from now on: between two blocks, the earlier."""
        self._end_part()
        self._part = part

    def _end_part(self) -> None:
        for name, container in self._containers.items():
            content, then = _tensors_of(container), self._contents[name]
            if len(content) != len(then) or not all(map(is_, content, then)):
                self._changed_in[name].add(self._part)
                self._contents[name] = content

    def mode(self) -> TorchDispatchMode:
        """To be entered wherever operators of the model run."""
        return _TouchMode(self)

    def touch(self, tensors: Sequence[torch.Tensor]) -> None:
        """An operator has these arguments."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                name = self._names.get(storage_key(tensor))
                if name is not None:
                    self._parts[name].add(self._part)

    def refuse_mixed(self) -> None:
        """Raise if one part has changed what another touches, now that the forward has ended."""
        self._end_part()
        for name, parts in self._changed_in.items():
            if len(parts) > 1:
                raise ConfigError(
                    f"several parts of the model change what is in {name}",
                    why="micro-batches of a step go through the model side by side, and would find "
                    "there what another one left",
                    remedy=f"begin the forward with one of its own (`self.{_last(name)} = ...`) "
                    "instead of clearing it, or give each step one micro-batch",
                )
        for name, tensor in self._tensors.items():
            if len(self._parts[name]) > 1 and not same_bits(tensor, self._before[name]):
                raise ConfigError(
                    f"{name} is changed in place by the forward, and touched by several parts of "
                    "the model",
                    why="micro-batches of a step go through the model side by side, and each would "
                    "find what another one left there",
                    remedy=f"assign it anew (`self.{_last(name)} = ...`) before the "
                    "blocks instead of changing it in place, or give each step one micro-batch",
                )


class _TouchMode(TorchDispatchMode):
    def __init__(self, state: SharedState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = state

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._state.touch(tensors_in((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _outside(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers and tensors in attributes of modules that belong to no block, or to several."""
    num_owners = Counter(part for block in dict.fromkeys(blocks) for part in block.modules())
    for path, module in model.named_modules():
        if num_owners[module] == 1:
            continue
        for values in (module._buffers, vars(module)):
            for name, value in values.items():
                is_own = isinstance(value, torch.Tensor) and not isinstance(
                    value, torch.nn.Parameter
                )
                if is_own and value.layout is torch.strided and not value.is_meta:
                    yield f"{path}.{name}".removeprefix("."), value.detach()


def _containers_outside(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module]
) -> Iterator[tuple[str, Any]]:
    inside = {part for block in blocks for part in block.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items() if module not in inside else ():
            if name not in OWN_NAMES and type(value) in (list, dict, set):
                yield f"{path}.{name}".removeprefix("."), value


def _tensors_of(container: Any) -> list[torch.Tensor]:
    """What may be computed with; the rest is taken for a log."""
    values = container.values() if isinstance(container, dict) else container
    return [value for value in values if isinstance(value, torch.Tensor)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
