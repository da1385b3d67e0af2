"""What a block changes inside of values that it keeps in attributes: lists and mappings it adds
to, generators it draws from, tensors it writes to. A re-run must start from what the forward found.

Owns putting the contents of containers and the states of generators back for a re-run. A tensor in
an attribute is only watched: one that a forward writes to should be a buffer, which
`changing_buffers` looks after; attributes that are assigned anew are up to `own_attributes`. Called
by `block_run`, and by `step` around a forward that must leave no trace.
"""

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from lohan.errors import ConfigError
from lohan.model.skeleton import CONTAINERS
from lohan.runtime.model_buffers import put_value
from lohan.runtime.segments.own_attributes import OWN_NAMES

_GENERATORS = (torch.Generator, random.Random)
_NUM_LOOKS = 8
"""Forwards before which attributes are looked through: some are there only after the first."""
_Kept = list[tuple[Any, Any]]
"""Values, and what was in them."""


class HeldValues:
    """The containers, generators and tensors in the attributes of one block and its parts."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._places: list[tuple[dict[str, Any], str]] = []
        self._num_looks = 0

    def before(self) -> _Kept:
        """What is in them, before a forward."""
        if self._num_looks < _NUM_LOOKS:
            self._num_looks += 1
            self._places = _places(self._module)
        # Most blocks have none of these.
        return [
            (value, _content(value))
            for target, name in self._places
            if _is_held(value := target.get(name))
        ]

    def changed(self, before: _Kept, *, is_run_again: bool) -> _Kept:
        """Of these, the ones that the forward has changed.

        Raises:
            ConfigError: one is a tensor, and the block is to be run again.
        """
        found = [(value, content) for value, content in before if not _is_same(value, content)]
        if is_run_again and any(isinstance(value, torch.Tensor) for value, _ in found):
            raise ConfigError(
                f"block {self._name} changes a tensor in place that it keeps in an attribute",
                why="the block is run again in backward, and would change it twice",
                remedy="make it a buffer (`self.register_buffer`), or assign a new tensor to the "
                "attribute",
            )
        return found

    @contextlib.contextmanager
    def as_before(self, before: _Kept) -> Iterator[None]:
        """Run with the contents of then, and end with those of now."""
        now = [(value, _content(value)) for value, _ in before]
        for value, content in before:
            _put(value, content)
        try:
            yield
        finally:
            for value, content in now:
                _put(value, content)


@contextlib.contextmanager
def held_values_left(module: torch.nn.Module) -> Iterator[None]:
    """Whatever runs inside, containers, generators and tensors in attributes end as they are."""
    found = [target[name] for target, name in _places(module)]
    held = [one for one in found if not (_is_tensor(one) and (one.is_meta or one.is_sparse))]
    before = [(one, one.detach().clone() if _is_tensor(one) else _content(one)) for one in held]
    try:
        yield
    finally:
        for value, content in before:
            if not _is_tensor(value):
                _put(value, content)
            elif not same_bits(value, content):
                put_value(value.detach(), content)


def _places(module: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    return [
        (vars(part), name)
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in OWN_NAMES and _is_held(value)
    ]


def _is_held(value: Any) -> bool:
    return type(value) in CONTAINERS or isinstance(value, (torch.Tensor, *_GENERATORS))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type are equal; NaNs are equal to themselves here."""
    return one.shape == other.shape and torch.equal(
        one.detach().contiguous().reshape(-1).view(torch.uint8),
        other.detach().contiguous().reshape(-1).view(torch.uint8),
    )


def _content(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    return list(value.items()) if isinstance(value, dict) else list(value)


def _is_same(value: Any, content: Any) -> bool:
    now = _content(value)
    if isinstance(value, torch.Generator):
        return torch.equal(now, content)
    if not isinstance(value, CONTAINERS):
        return bool(now == content)
    if len(now) != len(content):
        return False
    if isinstance(value, dict):
        pairs = zip(now, content, strict=True)
        return all(key is old and one is other for (key, one), (old, other) in pairs)
    return all(one is other for one, other in zip(now, content, strict=True))


def _put(value: Any, content: Any) -> None:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    else:
        value.clear()
        if isinstance(value, (list, deque)):
            value.extend(content)
        else:
            value.update(content)
