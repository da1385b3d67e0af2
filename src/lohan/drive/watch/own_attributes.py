"""What micro-batches leave in the attributes of modules: each finds its own when it goes on.

In plain training a model that keeps something in an attribute (`self.mask`, a block's `last_size`)
and reads it later in the same forward finds its own value. Here the forwards of a step are
interleaved at blocks, and blocks are run again. So a micro-batch sees what it wrote itself, else
what the nearest one before it wrote, as in a plain loop; never what a later one wrote. So are
attributes of plain objects and entries of mappings that modules hold (`self.context.mask`). By
identity: what is changed inside another value (a list that is cleared, a tensor in place, buffers)
is everybody's.
Made by `segmented_model` for one step; called by `micro_batch`, on the thread of the micro-batch
or while it waits, and by `passes` for its backward.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lohan.drive.weights.parameter_views import Weights
from lohan.model.tracing.objects import parts_that_change

_Values = dict[Any, Any]
OWN_NAMES = frozenset((*vars(torch.nn.Module()), "forward"))
"""What every module has; `forward` is replaced while a step runs."""
_MISSING = object()
_Change = tuple[_Values, Any, Any]
"""Attributes of a module or an object, or a mapping; the name of one, and its value before."""


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

    def put(self, index: int) -> None:
        _put_back([(self.target, self.name, self.value_for(index))])


class AttributeBook:
    """The attributes of a model during one step."""

    def __init__(self, modules: Sequence[torch.nn.Module], num_micro_batches: int) -> None:
        """`modules`: those whose attributes code outside the blocks may change."""
        # One that is alone has everything to itself.
        self.is_needed = num_micro_batches > 1
        self.modules = modules
        self._written: dict[tuple[int, Any], _Written] = {}
        self._held: dict[torch.nn.Module | None, list[_Values]] = {}

    def snapshot(self, block: torch.nn.Module | None = None) -> list[tuple[_Values, _Values]]:
        """The attributes of a block, or of all that code outside the blocks may change."""
        modules = self.modules if block is None else list(block.modules())
        found = [vars(part) for part in modules]
        # A buffer that is assigned anew is no attribute: modules keep theirs in their own place.
        found += [part._buffers for part in modules if part._buffers]
        if self.is_needed:
            if block not in self._held:
                # Once a step: an object that is made later is assigned, and so has one owner.
                self._held[block] = _mappings_in(modules)
            found += self._held[block]
        return [(one, dict(one)) for one in found]

    def note(self, index: int, changes: Iterable[_Change]) -> None:
        """A micro-batch has run: what it changed is its own."""
        if not self.is_needed:
            return
        for target, name, then in changes:
            one = self._written.setdefault(
                (id(target), name), _Written(target=target, name=name, original=then)
            )
            one.values[index] = target.get(name, _MISSING)

    def put(self, index: int) -> None:
        """A micro-batch is about to run: all attributes are as for it alone. Of all modules, also
        where a block runs: one may read what another module was given."""
        for one in self._written.values():
            one.put(index)

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
        self._before: list[tuple[_Values, _Values]] = []
        self._is_over = False

    def begin(self) -> None:
        """Its code outside the blocks starts, or goes on."""
        if self._book.is_needed:
            self._book.put(self._index)
            # In blocks too: some are given what they need as attributes (`block.mask = mask`).
            self._before = self._book.snapshot()

    def pause(self) -> None:
        """Its code outside the blocks waits for a block, or ends."""
        self._book.note(self._index, _changes(self._before))
        self._before = []

    def end(self) -> None:
        """Its forward is over: what a re-run leaves is put back by whoever runs it."""
        self.pause()
        self._is_over = True

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Its code may run again, or be called: checkpoints, hooks, a Function's backward."""
        self._book.put(self._index)
        yield
        self._book.keep(self._index)

    def around(
        self, module: torch.nn.Module, forward: Callable[..., Any], weights: Weights
    ) -> tuple[Callable[..., Any], list[_Change]]:
        """The forward of a block that sees these attributes, and what it has changed, noted when it
        has run; run again, it starts from where it did (`self.num_calls += 1`). Weights do not stay
        in attributes."""
        first: list[_Change] = []

        def with_own(*args: Any, **kwargs: Any) -> Any:
            self._book.put(self._index)
            if self._is_over:
                _put_back(first)
                return forward(*args, **kwargs)
            before = self._book.snapshot(module)
            try:
                result = forward(*args, **kwargs)
            except BaseException:
                _put_back(_changes(before))
                raise
            first[:] = _changes(before)
            for target, name, _ in first:
                value = target.get(name)
                if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                    # Its memory is about to be somebody else's: whoever reads it is told so.
                    with _disable_current_modes():
                        target[name] = weights.stand_in(value)
            self._book.note(self._index, first)
            return result

        return with_own, first


def _mappings_in(modules: Iterable[torch.nn.Module]) -> list[_Values]:
    """Attributes of objects that modules hold, and mappings."""
    values = [
        value for part in modules for name, value in vars(part).items() if name not in OWN_NAMES
    ]
    held = parts_that_change(values, enters_modules=False)
    return [one for one in held if isinstance(one, dict)]


def _changes(before: Iterable[tuple[_Values, _Values]]) -> list[_Change]:
    found: list[_Change] = []
    for target, then in before:
        if target.keys() == then.keys() and all(map(is_, target.values(), then.values())):
            continue  # as nearly always
        ignored = OWN_NAMES if "_modules" in target else ()
        for name in target.keys() | then.keys():
            value = then.get(name, _MISSING)
            if name not in ignored and value is not target.get(name, _MISSING):
                found.append((target, name, value))
    return found


def _put_back(changes: Iterable[_Change]) -> None:
    for target, name, value in changes:
        if value is _MISSING:
            target.pop(name, None)
        else:
            target[name] = value
