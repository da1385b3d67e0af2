"""Buffers that a block changes as it runs (running statistics): a re-run must not do it again.

Owns finding out which they are and putting old values back for a re-run. Called by `block_run`.
"""

import contextlib
from collections.abc import Iterator, Mapping

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
        now = dict(self._module.named_buffers()) if before else {}
        after = {name: now[name].clone() for name in before}
        try:
            _write(now, before)
            yield
        finally:
            _write(now, after)


def _write(buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            buffers[name].copy_(value)
