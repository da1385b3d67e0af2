"""What micro-batches leave in the attributes of modules: each finds its own when it goes on.

In plain training a model that keeps something in an attribute (`self.mask`, a block's `last_size`)
and reads it later in the same forward finds its own value. Here the forwards of a step are
interleaved at blocks. So a micro-batch sees what it wrote itself, else what the nearest one before
it wrote, as in a plain loop; never what a later one wrote. So are attributes of plain objects and
entries of mappings that modules hold (`self.context.mask`). By identity: what is changed inside
another value (a list that is cleared, a tensor in place, buffers) is everybody's.
Made by `segmented_model` for one step; called by `micro_batch`, on the thread of the micro-batch,
by `block_run` for what blocks assign, and by `passes` for its backward.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from lohan.model.tracing.objects import parts_that_change

_Values = dict[Any, Any]
OWN_NAMES = frozenset((*vars(torch.nn.Module()), "forward"))
"""What every module has; `forward` is replaced while a step runs."""
_MISSING = object()
Change = tuple[_Values, Any, Any]
"""Attributes of a module or an object, or a mapping; the name of one, and its value before."""
Bindings = list[tuple[_Values, _Values]]
"""Such attributes, and a copy of them."""


def bindings_of(modules: Iterable[torch.nn.Module], more: Iterable[_Values] = ()) -> Bindings:
    """What names stand for in modules, and in more mappings. A buffer that is assigned anew is no
    attribute: modules keep theirs in a place of its own."""
    found = [one for part in modules for one in (vars(part), part._buffers)]
    return [(one, dict(one)) for one in (*found, *more)]


def bound_anew(before: Bindings) -> list[Change]:
    """Names that stand for something else now."""
    found: list[Change] = []
    for target, then in before:
        if target.keys() == then.keys() and all(map(is_, target.values(), then.values())):
            continue  # as nearly always
        for name in target.keys() | then.keys():
            value = then.get(name, _MISSING)
            if value is not target.get(name, _MISSING):
                found.append((target, name, value))
    return found


def bind(changes: Iterable[Change]) -> None:
    """Let names stand for what they did before."""
    for target, name, value in changes:
        if value is _MISSING:
            target.pop(name, None)
        else:
            target[name] = value


@dataclass(slots=True, kw_only=True)
class _Written:
    """One attribute that some micro-batches have written."""

    target: _Values
    name: Any
    original: Any
    values: dict[int, Any] = field(default_factory=dict)
    """By micro-batch."""

    def value_for(self, index: int) -> Any:
        before = [writer for writer in self.values if writer <= index]
        return self.values[max(before)] if before else self.original


class AttributeBook:
    """The attributes of a model during one step."""

    def __init__(self, modules: Sequence[torch.nn.Module], num_micro_batches: int) -> None:
        """`modules`: those whose attributes code outside the blocks may change."""
        # One that is alone has everything to itself.
        self.is_needed = num_micro_batches > 1
        self._modules = modules
        # Once a step: an object that is made later is assigned, and so has one owner.
        self._held = _mappings_in(modules) if self.is_needed else []
        self._written: dict[tuple[int, Any], _Written] = {}

    def snapshot(self) -> Bindings:
        """All that code outside the blocks may change."""
        return bindings_of(self._modules, self._held)

    def note(self, index: int, changes: Iterable[Change]) -> None:
        """A micro-batch has run: what it changed is its own."""
        for target, name, then in changes if self.is_needed else ():
            if name not in OWN_NAMES or "_modules" not in target:
                one = self._written.setdefault(
                    (id(target), name), _Written(target=target, name=name, original=then)
                )
                one.values[index] = target.get(name, _MISSING)

    def put(self, index: int) -> None:
        """A micro-batch is about to run: all attributes are as for it alone. Of all modules, also
        where a block runs: one may read what another module was given."""
        bind((one.target, one.name, one.value_for(index)) for one in self._written.values())

    def keep(self, index: int) -> None:
        """What a micro-batch has done since to attributes that were written before is its own."""
        for one in self._written.values():
            value = one.target.get(one.name, _MISSING)
            if value is not one.value_for(index):
                one.values[index] = value


class OwnAttributes:
    """The attributes as one micro-batch sees them."""

    def __init__(self, book: AttributeBook, index: int) -> None:
        self._book, self._index = book, index
        self._before: Bindings = []

    def begin(self) -> None:
        """Its code outside the blocks starts, or goes on."""
        if self._book.is_needed:
            self.put()
            # In blocks too: some are given what they need as attributes (`block.mask = mask`).
            self._before = self._book.snapshot()

    def pause(self) -> None:
        """Its code outside the blocks waits for a block, or ends."""
        self.note(bound_anew(self._before))
        self._before = []

    def put(self) -> None:
        """One of its blocks is about to run."""
        self._book.put(self._index)

    def note(self, changes: Iterable[Change]) -> None:
        """It has changed these."""
        self._book.note(self._index, changes)

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Its code may run again, or be called: checkpoints, hooks, a Function's backward."""
        self.put()
        yield
        self._book.keep(self._index)


def _mappings_in(modules: Iterable[torch.nn.Module]) -> list[_Values]:
    """Attributes of objects that modules hold, and mappings."""
    values = [
        value for part in modules for name, value in vars(part).items() if name not in OWN_NAMES
    ]
    held = parts_that_change(values, enters_modules=False)
    return [one for one in held if isinstance(one, dict)]
