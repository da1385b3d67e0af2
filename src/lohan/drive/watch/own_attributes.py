"""What micro-batches leave in the attributes of modules: each finds its own when it goes on.

In plain training a model that keeps something in an attribute (`self.mask`, a block's `last_size`)
and reads it later in the same forward finds its own value. Here the forwards of a step are
interleaved at blocks. So a micro-batch sees what it wrote itself, else what the nearest one before
it wrote, as in a plain loop; never what a later one wrote. So are attributes of plain objects and
entries of mappings that modules hold (`self.context.mask`). By identity: what is changed inside
another value (a list that is cleared, a tensor in place, buffers) is everybody's. A number that is
counted after blocks comes too late for those that have begun meanwhile: refused where it is read.
Made by `segmented_model` for one step; called by `micro_batch`, on the thread of the micro-batch,
by `block_run` for what blocks assign, and by `passes` for its backward.
"""

import contextlib
import dis
import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from lohan.errors import ConfigError
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


def is_bound_as(target: _Values, then: _Values) -> bool:
    """Whether the names of a mapping stand for what they did."""
    if len(target) != len(then):
        return False
    if not target:
        return True
    return all(map(is_, target, then)) and all(map(is_, target.values(), then.values()))


def bound_anew(before: Bindings) -> list[Change]:
    """Names that stand for something else now."""
    found: list[Change] = []
    for target, then in before:
        if is_bound_as(target, then):
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
        self._last_begun = -1
        self._snapshot: Bindings | None = None
        """As long as nothing was changed since."""

    def begin(self, index: int) -> None:
        """A micro-batch begins, or goes on."""
        self._last_begun = max(self._last_begun, index)

    def refuse_late_counts(self, index: int, changes: Sequence[Change]) -> None:
        """Refuse a number that later micro-batches should have found, and may have read.

        Raises:
            ConfigError: naming it.
        """
        if index == self._last_begun or not changes:
            return
        owners = {id(vars(part)): part for part in self._modules}
        for target, name, then in changes:
            now, owner = target.get(name), owners.get(id(target))
            if not (_is_number(then) and _is_number(now)) or then == now:
                continue
            if owner is None:
                continue
            kind: Any = type(owner)
            is_counted, is_read = _counts(kind, name)
            known = self._written.get((id(target), name))
            if is_counted and (is_read or (known is not None and max(known.values) > index)):
                raise ConfigError(
                    f"{kind.__name__} changes its {name} from {then} to {now} after a block",
                    why="the next micro-batch has begun by then, and would have read the new "
                    "number in a plain loop",
                    remedy="change it before the first block, or train with one micro-batch a step "
                    "(gradient_accumulation_steps=1)",
                )

    def snapshot(self) -> Bindings:
        """All that code outside the blocks may change."""
        if self._snapshot is None:
            self._snapshot = bindings_of(self._modules, self._held)
        return self._snapshot

    def note(self, index: int, changes: Iterable[Change]) -> None:
        """A micro-batch has run: what it changed is its own."""
        for target, name, then in changes if self.is_needed else ():
            self._snapshot = None
            if name not in OWN_NAMES or "_modules" not in target:
                one = self._written.setdefault(
                    (id(target), name), _Written(target=target, name=name, original=then)
                )
                one.values[index] = target.get(name, _MISSING)

    def put(self, index: int) -> None:
        """A micro-batch is about to run: all attributes are as for it alone. Of all modules, also
        where a block runs: one may read what another module was given."""
        if self._written:
            self._snapshot = None
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
            self._book.begin(self._index)
            self.put()
            # In blocks too: some are given what they need as attributes (`block.mask = mask`).
            self._before = self._book.snapshot()

    def pause(self) -> None:
        """Its code outside the blocks waits for a block, or ends."""
        changes = bound_anew(self._before)
        self._book.refuse_late_counts(self._index, changes)
        self.note(changes)
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@functools.lru_cache(maxsize=64)
def _counts(kind: type, name: Any) -> tuple[bool, bool]:
    """Whether code of a class counts an attribute (`self.n += 1`), and whether some of it reads the
    attribute otherwise, unless that comes behind the count in one function."""
    is_counted = is_read = False
    own = [one for one in kind.__mro__ if one not in torch.nn.Module.__mro__]
    for function in filter(inspect.isfunction, (it for one in own for it in vars(one).values())):
        found = list(dis.get_instructions(function))
        for place, one in enumerate(found):
            if one.opname == "LOAD_ATTR" and one.argval == name:
                stored = [late for late in found[place : place + 8] if late.opname == "STORE_ATTR"]
                if stored and stored[0].argval == name:
                    is_counted = True
                    break
                is_read = True
    return is_counted, is_read


def _mappings_in(modules: Iterable[torch.nn.Module]) -> list[_Values]:
    """Attributes of objects that modules hold, and mappings."""
    values = [
        value for part in modules for name, value in vars(part).items() if name not in OWN_NAMES
    ]
    held = parts_that_change(values, enters_modules=False)
    return [one for one in held if isinstance(one, dict)]
