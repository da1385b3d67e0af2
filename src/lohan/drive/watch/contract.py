"""The contract of a block: a function of its arguments, parameters, buffers and torch's default
generators.

It is run again for its backward, or as a recorded graph, and takes all micro-batches before the
next block takes any. So a block may change its buffers and bind its own attributes anew: these are
put back for a run again (`Changes`). All else that it can reach must be after its forward what it
was before: what is inside of its attributes (lists, mappings, objects, generators, tensors), its
arguments, the attributes of everybody else, Python's and numpy's generators. Owns the snapshot, the
comparison and the one message. Called by `block_run`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lohan.drive.surroundings.host_randomness import HostState
from lohan.drive.watch.own_attributes import Bindings, Change, bind, bindings_of, bound_anew
from lohan.errors import ConfigError
from lohan.model.tracing.kept_contents import content_of, is_same, put_value, same_bits
from lohan.model.tracing.objects import PLAIN, parts_that_change

_SMALL_BYTES = 64 * 1024
"""Buffers up to this size are copied before every forward: one may begin to change at any time."""


class Snapshot:
    """What is in some values, all the way down, at one moment."""

    def __init__(self, values: Mapping[str, Any], but_for: Sequence[Any] = ()) -> None:
        """`values`: by the names they are told by; `but_for`: what may change."""
        self._values = values
        may_change = set(map(id, but_for))
        parts = parts_that_change(values.values(), enters_modules=False)
        self._before = [(one, content_of(one)) for one in parts if id(one) not in may_change]

    def changed(self) -> str | None:
        """The name of a value that holds something else now; None if all are as they were."""
        for part, content in self._before:
            if not is_same(part, content):
                name = self._name_of(part) + _entry_of(part, content)
                return name.replace("._parameters.", ".").replace("._modules.", ".")
        return None

    def _name_of(self, part: Any) -> str:
        for name, value in self._values.items():
            if any(one is part for one in parts_that_change([value], enters_modules=False)):
                return name
        return "what hangs on its attributes"


def _entry_of(part: Any, content: Any) -> str:
    if not isinstance(part, dict):
        return ""
    before = dict(content)
    names = (name for name in {**before, **part} if part.get(name) is not before.get(name))
    name = next(names, None)
    return f".{name}" if isinstance(name, str) else ""


@dataclass(slots=True)
class Changes:
    """What a forward has changed in its block, as it was before."""

    attributes: list[Change] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def effect(self) -> str | None:
        """Why a graph cannot stand for the block."""
        if self.buffers:
            return f"it changes its buffer {next(iter(self.buffers))}"
        return next((f"it assigns its attribute {name}" for _, name, _ in self.attributes), None)


class Contract:
    """What one block promises, looked after while its own code runs."""

    def __init__(
        self, module: torch.nn.Module, name: str, outside: Mapping[str, torch.nn.Module]
    ) -> None:
        """`outside`: modules in no block, and blocks, by path."""
        self._module, self._name, self._outside = module, name, outside
        # Names of buffers that change, by the mode of the block's modules.
        self._changing: dict[tuple[bool, ...], set[str]] = {}

    @contextlib.contextmanager
    def watched(self, arguments: Any, *, is_run_again: bool) -> Iterator[Changes]:
        """Run the forward of the block inside; then what it has changed is in the result. If it
        fails, its attributes are as they were.

        Raises:
            ConfigError: it has changed what it may not, and is to be run again.
        """
        changes, before = Changes(), bindings_of(self._module.modules())
        try:
            if is_run_again:
                everything, host = self._everything(arguments, before), HostState.now()
                buffers = self._buffers_before()
                yield changes
                if host != HostState.now():
                    self._refuse("Python's or numpy's random generator")
                if (name := everything.changed()) is not None:
                    self._refuse(name)
                changes.buffers = self._changed_buffers(buffers)
            else:
                yield changes
        except BaseException:
            bind(bound_anew(before))
            raise
        changes.attributes = bound_anew(before)

    def _everything(self, arguments: Any, own: Bindings) -> Snapshot:
        values: dict[str, Any] = {
            f"{path}.{name}": value
            for path, part in self._module.named_modules(prefix=self._name)
            for name, value in vars(part).items()
            if type(value) not in PLAIN
        }
        values |= {path or "the model": vars(module) for path, module in self._outside.items()}
        values["an argument"] = arguments
        # These are looked at by themselves.
        may_change = [*(target for target, _ in own), *self._module.buffers()]
        may_change += [part._non_persistent_buffers_set for part in self._module.modules()]
        return Snapshot(values, may_change)

    def _refuse(self, what: str) -> None:
        raise ConfigError(
            f"block {self._name} changes {what}",
            why="it is run again in backward, or as a recorded graph, so it must be a function of "
            "its arguments, parameters, buffers and torch's default generators",
            remedy="return what others need of the block; keep what lasts in a buffer "
            "(`self.register_buffer`) or an attribute that it assigns anew; draw with torch; for a "
            "cache of keys and values, pass use_cache=False",
        )

    @contextlib.contextmanager
    def as_before(self, changes: Changes) -> Iterator[None]:
        """Run it again from where the forward began, and end with the block as it is now."""
        before = bindings_of(self._module.modules())
        # By value, not by version: some operators write to statistics without saying so.
        values = [
            (buffer, buffer.clone())
            for name, buffer in self._module.named_buffers()
            if name in changes.buffers
        ]
        bind(changes.attributes)
        for name, buffer in self._module.named_buffers():
            if name in changes.buffers:
                put_value(buffer, changes.buffers[name])
        try:
            yield
        finally:
            bind(bound_anew(before))
            for buffer, value in values:
                put_value(buffer, value)

    # Buffers

    def _buffers_before(self) -> dict[str, tuple[torch.Tensor, int, torch.Tensor | None]]:
        """Each buffer, its version, and a copy if it may change: all the first time."""
        changing = self._changing.get(self._mode())
        return {
            name: (
                buffer,
                buffer._version,
                buffer.clone()
                if changing is None or name in changing or buffer.nbytes <= _SMALL_BYTES
                else None,
            )
            for name, buffer in self._module.named_buffers()
        }

    def _changed_buffers(
        self, before: Mapping[str, tuple[torch.Tensor, int, torch.Tensor | None]]
    ) -> dict[str, torch.Tensor]:
        now, mode = dict(self._module.named_buffers()), self._mode()
        changing = self._changing.get(mode)
        if changing is None:
            # By value, not by version: some operators write to statistics without saying so.
            changing = self._changing[mode] = {
                name
                for name, (_, _, copy) in before.items()
                if copy is not None and (name not in now or not same_bits(copy, now[name]))
            }
        found: dict[str, torch.Tensor] = {}
        for name, (buffer, version, copy) in before.items():
            if now.get(name) is not buffer or buffer._version != version:
                changing.add(name)
            if name in changing:
                if copy is None:
                    self._refuse(f"its buffer {name} of {buffer.nbytes} bytes for the first time")
                else:
                    found[name] = copy
        return found

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._module.modules())
