"""What is inside of objects that blocks are given: a block is run again from its arguments, so
these must be then what they were.

Containers that PyTorch knows are taken apart and put together again for every run (`entries`);
other objects (a cache of keys and values, a dataclass) are passed on as they are. Owns telling
whether one has changed, by identity of what it holds and versions of tensors. Called by `entries`.
"""

import types
from collections.abc import Iterable
from typing import Any

import torch

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    torch.nn.Module,
)
"""What cannot change, or is looked after elsewhere."""
_MOST_PARTS = 10_000
"""Of what is larger only the beginning is looked at."""


class Contents:
    """Some objects and what they hold, all the way down."""

    __slots__ = ("_before", "_objects")

    def __init__(self, leaves: Iterable[Any]) -> None:
        """`leaves`: arguments, of which only the objects matter."""
        self._objects = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_PLAIN))]
        self._before = _parts(self._objects) if self._objects else []

    def has_changed(self) -> bool:
        """Whether they hold other things now, or tensors with other values."""
        if not self._objects:
            return False
        now = _parts(self._objects)
        return len(now) != len(self._before) or any(
            one is not other or version != then
            for (one, version), (other, then) in zip(now, self._before, strict=True)
        )


def _parts(objects: list[Any]) -> list[tuple[Any, int]]:
    found: list[tuple[Any, int]] = []
    to_visit, visited = list(objects), set[int]()
    while to_visit and len(found) < _MOST_PARTS:
        value = to_visit.pop()
        found.append((value, value._version if isinstance(value, torch.Tensor) else 0))
        if isinstance(value, (torch.Tensor, *_PLAIN)) or id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, dict):
            to_visit.extend(value.keys())
            to_visit.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            to_visit.extend(value)
        if hasattr(value, "__dict__"):
            to_visit.extend(vars(value).values())
        for name in getattr(type(value), "__slots__", ()):
            to_visit.append(getattr(value, name, None))
    return found
