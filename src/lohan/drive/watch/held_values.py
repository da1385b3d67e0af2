"""What a block changes inside of values that it keeps in attributes: lists and mappings it adds
to, objects of its own, hooks, generators it draws from, tensors it writes to. A re-run must start
from what the forward found.

Owns which of these a block has, and when they are put back (`model.kept_contents`). A tensor is
only watched: one that a forward writes to should be a buffer, which `changing_buffers` looks after;
attributes that are assigned anew are up to `own_attributes`. Called by `block_run`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lohan.errors import ConfigError
from lohan.model.tracing.kept_contents import Kept, content_of, is_same, put_back
from lohan.model.tracing.objects import is_shared, parts_that_change

_NUM_LOOKS = 8
"""Forwards before which attributes are looked through: some are there only after the first."""
_ELSEWHERE = frozenset(("_parameters", "_buffers", "_modules", "forward"))
"""Attributes that others look after; `forward` is replaced while a step runs."""


class HeldValues:
    """The containers, generators and tensors in the attributes of one block and its parts."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._places: list[tuple[dict[str, Any], str]] = []
        self._num_looks = 0

    def before(self) -> Kept:
        """What is in them, before a forward."""
        if self._num_looks < _NUM_LOOKS:
            self._num_looks += 1
            self._places = _places(self._module)
        values = [target.get(name) for target, name in self._places]
        return [(one, content_of(one)) for one in parts_that_change(values, enters_modules=False)]

    def changed(self, before: Kept, *, is_run_again: bool) -> Kept:
        """Of these, the ones that the forward has changed.

        Raises:
            ConfigError: one is a tensor, and the block is to be run again.
        """
        found = [(value, content) for value, content in before if not is_same(value, content)]
        if is_run_again and any(isinstance(value, torch.Tensor) for value, _ in found):
            raise ConfigError(
                f"block {self._name} changes a tensor in place that it keeps in an attribute",
                why="the block is run again in backward, and would change it twice",
                remedy="make it a buffer (`self.register_buffer`), or assign a new tensor to the "
                "attribute",
            )
        return found

    @contextlib.contextmanager
    def as_before(self, before: Kept) -> Iterator[None]:
        """Run with the contents of then, and end with those of now."""
        now = [(value, content_of(value)) for value, _ in before]
        for value, content in before:
            put_back(value, content)
        try:
            yield
        finally:
            for value, content in now:
                put_back(value, content)


def _places(module: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    return [
        (vars(part), name)
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in _ELSEWHERE and not is_shared(value)
    ]
