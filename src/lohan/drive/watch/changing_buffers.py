"""What a model changes in itself as it runs (running statistics): a re-run must not do it again.

Owns finding out which buffers these are, putting their old values back for a re-run, and leaving a
block as it was. Called by `block_run` around the re-run of a block.
"""

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lohan.errors import ConfigError
from lohan.model.tracing.kept_contents import put_value

_SMALL_BYTES = 64 * 1024
"""Buffers up to this size are copied before every forward: one may begin to change at any time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuffersBefore:
    """The buffers of a block before its forward."""

    copies: Mapping[str, torch.Tensor]
    found: Mapping[str, tuple[torch.Tensor, int]]
    """All of them, with their versions."""


class ChangingBuffers:
    """The buffers of one block that its forward writes to, found by watching it."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self._module, self._name = module, name
        # By mode of the block's modules.
        self._changing: dict[tuple[bool, ...], set[str]] = {}

    def before(self) -> BuffersBefore:
        """Copies of the buffers that the forward may change: all of them the first time."""
        changing = self._changing.get(self._mode())
        found = dict(self._module.named_buffers())
        return BuffersBefore(
            copies={
                name: buffer.clone()
                for name, buffer in found.items()
                if changing is None or name in changing or buffer.nbytes <= _SMALL_BYTES
            },
            found={name: (buffer, buffer._version) for name, buffer in found.items()},
        )

    def changed(self, before: BuffersBefore) -> dict[str, torch.Tensor]:
        """Of the copies made before a forward, those that it made out of date.

        Raises:
            ConfigError: a large buffer changed that had not done so before.
        """
        now = dict(self._module.named_buffers())
        changing = self._changing.get(self._mode())
        if changing is None:
            # By value, not by version: some operators write to statistics without saying so.
            changing = self._changing[self._mode()] = {
                name
                for name, old in before.copies.items()
                if name not in now or not torch.equal(old, now[name])
            }
        for name, (buffer, version) in before.found.items():
            if now.get(name) is not buffer or buffer._version != version:
                changing.add(name)
        missed = sorted(changing & before.found.keys() - before.copies.keys())
        if missed:
            raise ConfigError(
                f"buffer {missed[0]} of block {self._name} was changed by its forward for the "
                "first time",
                why="the block is run again in backward, from a value that was not kept",
                remedy="change it from the first forward on, or outside the blocks",
            )
        return {name: old for name, old in before.copies.items() if name in changing}

    def put_back(self, before: BuffersBefore) -> None:
        """Undo a forward that ended early."""
        _write((before.found[name][0], old) for name, old in before.copies.items())

    @contextlib.contextmanager
    def as_before(self, before: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Run with the buffers of then, and end with the module as it is now."""
        with _left_as_it_is(self._module, before):
            now = dict(self._module.named_buffers()) if before else {}
            _write((now[name], value) for name, value in before.items() if name in now)
            yield

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._module.modules())


@contextlib.contextmanager
def _left_as_it_is(module: torch.nn.Module, names: Container[str]) -> Iterator[None]:
    """Whatever runs inside, a module ends with the attributes and buffers it has now, and those
    named with their values."""
    # A re-run leaves out what its backward does not need, so what it assigns may have no value.
    own = [
        (target, dict(target))
        for part in module.modules()
        for target in (vars(part), part._buffers)
    ]
    # By value, not by version: some operators write to statistics without saying so.
    values = [(buffer, buffer.clone()) for name, buffer in module.named_buffers() if name in names]
    try:
        yield
    finally:
        for target, before in own:
            _put_back(target, before)
        _write(values)


def _put_back(current: dict[str, Any], before: dict[str, Any]) -> None:
    for name in current.keys() - before.keys():
        del current[name]
    for name, value in before.items():
        if name not in current or current[name] is not value:
            current[name] = value


def _write(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, value in values:
        put_value(buffer, value)
