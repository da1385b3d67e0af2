"""What a model holds besides modules and tensors: containers, objects of its own, closures.

Owns what lies behind a value, and which values are nobody's to copy or to put back (plain ones,
classes, what belongs to threads and files). Used by `skeleton`, which copies what may change, and
by `drive`, which puts it back. Imports torch.
"""

import enum
import functools
import pathlib
import random
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

CONTAINERS = (dict, list, set, deque)
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
PLAIN = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    )
)
_SHARED = (type, types.ModuleType, types.CodeType, enum.Enum, pathlib.PurePath, BaseException)
_SHARED_PACKAGES = frozenset(
    (
        *("lohan", "threading", "_thread", "queue", "_queue", "concurrent", "multiprocessing"),
        *("asyncio", "logging", "contextvars", "_contextvars", "_io", "io", "socket"),
    )
)
EMPTY = object()
"""Stands for what is not there: in a slot, in the cell of a closure."""


def is_shared(value: Any) -> bool:
    """Whether a value is left alone: it cannot change, or it is not the model's alone."""
    if type(value) in PLAIN or isinstance(value, _SHARED):
        return True
    owner = value if isinstance(value, types.FunctionType) else type(value)
    return str(owner.__module__).partition(".")[0] in _SHARED_PACKAGES


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, themselves and no copy; None if it has no place for them."""
    try:
        found = vars(value)
    except TypeError:
        return None
    return found if type(found) is dict else None


def slots_of(value: Any) -> tuple[types.MemberDescriptorType, ...]:
    """The slots of an object whose class has `__slots__`."""
    kind: Any = type(value)
    return _slots(kind)


@functools.cache
def _slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    return tuple(
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    )


def in_slot(member: types.MemberDescriptorType, value: Any) -> Any:
    """What is in one slot of an object."""
    try:
        return member.__get__(value)
    except AttributeError:
        return EMPTY


def in_cell(cell: types.CellType) -> Any:
    """What a closure has closed over."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def parts_that_change(roots: Iterable[Any], *, enters_modules: bool) -> list[Any]:
    """All that values hold, all the way down, and that may change: containers, attributes of
    objects (as dictionaries), objects with slots, cells of closures, tensors, arrays, generators.

    The values of parameters are left out, and modules too where they are not to be entered.
    """
    found: list[Any] = []
    to_visit, visited = list(roots), set[int]()
    while to_visit:
        value = to_visit.pop()
        kind = type(value)
        if kind in PLAIN or id(value) in visited:
            continue
        visited.add(id(value))
        if kind in _BARE:
            found.append(value)
            if value:  # Most modules have no hooks.
                to_visit.extend(held_in(value))
            continue
        if isinstance(value, nn.Module):
            if not enters_modules:
                continue
        elif is_shared(value) or isinstance(value, nn.Parameter):
            continue
        to_visit.extend(held_in(value))
        if isinstance(value, _CHANGING):
            found.append(value)
            if isinstance(value, _WITHOUT_ATTRIBUTES):
                continue
        elif slots := slots_of(value):
            found.append(value)
            to_visit.extend(in_slot(member, value) for member in slots)
        attributes = attributes_of(value)
        if attributes is not None:
            to_visit.append(attributes)
    return found


_BARE = frozenset((*CONTAINERS, OrderedDict))
"""Have no attributes: the quick way for nearly all there is."""
_CHANGING = (*CONTAINERS, types.CellType, torch.Tensor, np.ndarray, *GENERATORS)
_WITHOUT_ATTRIBUTES = (torch.Tensor, np.ndarray)


def held_in(value: Any) -> Iterable[Any]:
    """What lies in a container, behind a function, or behind a reference."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.BuiltinMethodType):
        return (value.__self__,)
    if isinstance(value, types.FunctionType):
        return (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__)
    if isinstance(value, types.CellType):
        return (in_cell(value),)
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords)
    return (value(),) if isinstance(value, weakref.ref) else ()


_FEW = 64
"""Entries of a container that may be settings; more are data."""


def settings_in(value: Any, depth: int = 6) -> Hashable:
    """Code and plain values in a function or an object: equal for those that do the same, as when
    one is made anew for every step. Of tensors, modules and data only the kind."""
    kind: type = type(value)
    if kind in PLAIN or isinstance(value, types.CodeType):
        return kind, value
    is_opaque = is_shared(value) or isinstance(value, (nn.Module, torch.Tensor, np.ndarray))
    if is_opaque or depth == 0:
        return kind
    held = [*held_in(value), *(attributes_of(value) or {}).items()]
    if len(held) > _FEW:
        return kind
    held += [value.__code__] if isinstance(value, types.FunctionType) else []
    return kind, tuple(settings_in(one, depth - 1) for one in held)
