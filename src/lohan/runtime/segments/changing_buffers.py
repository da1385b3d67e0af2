"""Buffers that a model changes as it runs (running statistics): a re-run must not do it again.

Owns finding out which they are and putting old values back, whether a module writes to its buffer
or assigns another one. Called by `block_run` around the re-run of a block, and by `step` around a
forward that must leave no trace.
"""

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping

import torch


class ChangingBuffers:
    """The buffers of one block that its forward writes to, found by watching it once per mode."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        # By value, not by version: some operators write to statistics without saying so.
        self._changing: dict[bool, frozenset[str]] = {}

    def before(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers that the forward may change: all of them the first time."""
        changing = self._changing.get(self._module.training)
        return {
            name: buffer.clone()
            for name, buffer in self._module.named_buffers()
            if changing is None or name in changing
        }

    def changed(self, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of the copies made before a forward, those that it made out of date."""
        if self._module.training not in self._changing:
            now = dict(self._module.named_buffers())
            self._changing[self._module.training] = frozenset(
                name for name, old in before.items() if not torch.equal(old, now[name])
            )
        changing = self._changing[self._module.training]
        return {name: old for name, old in before.items() if name in changing}

    @contextlib.contextmanager
    def as_before(self, before: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Run with the values of then, and end with the values of now."""
        if not before:
            yield
            return
        with buffers_kept(self._module, before):
            now = dict(self._module.named_buffers())
            _write((now[name], value) for name, value in before.items())
            yield


@contextlib.contextmanager
def buffers_kept(module: torch.nn.Module, names: Container[str] | None = None) -> Iterator[None]:
    """Whatever runs inside, the buffers of a module end as they are now: the same tensors with the
    same values. With `names`, only theirs."""
    kept = [
        (owner, name, buffer)
        for path, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if names is None or (f"{path}.{name}" if path else name) in names
    ]
    # By value, not by version: some operators write to statistics without saying so.
    values = {id(buffer): (buffer, buffer.clone()) for _, _, buffer in kept}
    try:
        yield
    finally:
        for owner, name, buffer in kept:
            if getattr(owner, name, None) is not buffer:
                setattr(owner, name, buffer)
        _write(values.values())


def _write(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in values:
            buffer.copy_(value)
