"""What a model changes in place outside its blocks: whose value does a micro-batch find?

Micro-batches of a step go side by side, one part of the model after the other. A buffer that one
part changes and another reads would be read with what a later micro-batch left there; in a plain
loop it is read with one's own. Owns finding this out, in the forward that counts random numbers,
where every operator is looked at anyway. What is assigned anew is looked after by `own_attributes`,
buffers of a block by `contract`. Called by `segmented_model`.
"""

from collections import Counter
from collections.abc import Sequence
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
    """Tensors, and containers of tensors, of one model, and which of its parts touch them during
    one forward."""

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._containers: dict[str, Any] = {}
        num_owners = Counter(part for block in dict.fromkeys(blocks) for part in block.modules())
        for path, module in model.named_modules():
            # Of modules that belong to no block; tensors also of those that belong to several.
            for name, value in (*module._buffers.items(), *vars(module).items()):
                full_name = f"{path}.{name}".removeprefix(".")
                if num_owners[module] != 1 and _is_own_tensor(value):
                    self._tensors[full_name] = value.detach()
                is_set = name not in OWN_NAMES and type(value) in (list, dict, set)
                if is_set and num_owners[module] == 0:
                    self._containers[full_name] = value
        self._before = {name: tensor.clone() for name, tensor in self._tensors.items()}
        self._names = {storage_key(tensor): name for name, tensor in self._tensors.items()}
        self._contents = {name: _tensors_of(one) for name, one in self._containers.items()}
        self._parts: dict[str, set[BlockId]] = {
            name: set() for name in (*self._tensors, *self._containers)
        }
        """Where tensors were touched, and containers changed."""
        self._part = BlockId(0)

    def begin_part(self, part: BlockId) -> None:
        """Another one is running from now on: between two blocks, the earlier."""
        self._end_part()
        self._part = part

    def _end_part(self) -> None:
        for name, container in self._containers.items():
            content, then = _tensors_of(container), self._contents[name]
            if len(content) != len(then) or not all(map(is_, content, then)):
                self._parts[name].add(self._part)
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
        for name in (name for name, parts in self._parts.items() if len(parts) > 1):
            if name in self._containers:
                what = f"several parts of the model change what is in {name}"
            elif not same_bits(self._tensors[name], self._before[name]):
                what = f"{name} is changed in place by the forward, and touched by several parts"
            else:
                continue
            raise ConfigError(
                what,
                why="micro-batches of a step go through the model side by side, and each would "
                "find what another one left there",
                remedy=f"begin the forward with a new one (`self.{name.rpartition('.')[2]} = ...`) "
                "instead of changing it in place, or give each step one micro-batch",
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


def _is_own_tensor(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return is_tensor and value.layout is torch.strided and not value.is_meta


def _tensors_of(container: Any) -> list[torch.Tensor]:
    """What may be computed with; the rest is taken for a log."""
    values = container.values() if isinstance(container, dict) else container
    return [value for value in values if isinstance(value, torch.Tensor)]
