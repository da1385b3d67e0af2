"""Copies of all that a model holds, for a run that must change nothing of the user's.

Owns copying containers, objects, closures, bound methods and references, each once: what two hold
in common their copies hold in common. Tensors and modules are up to the caller. What cannot be
copied (files, locks, iterators, classes) is shared. Called by `skeleton`.
"""

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from lohan.model.tracing.objects import (
    CONTAINERS,
    EMPTY,
    GENERATORS,
    PLAIN,
    attributes_of,
    in_cell,
    in_slot,
    is_shared,
    slots_of,
)


class ObjectCopies:
    """Copies of values, by identity.

    Args:
        copy_tensor: what stands for a tensor.
        copy_module: what stands for a module.
    """

    def __init__(
        self,
        copy_tensor: Callable[[torch.Tensor], torch.Tensor],
        copy_module: Callable[[nn.Module], nn.Module],
    ) -> None:
        self._copy_tensor, self._copy_module = copy_tensor, copy_module
        # With the original, whose identity must not become another's.
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """The copy of a value; the value itself where there is nothing to copy."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if isinstance(value, nn.Module):
            return self._copy_module(value)
        if id(value) in self._known:
            return self._known[id(value)][1]
        if is_shared(value):
            return value
        return self._known.setdefault(id(value), (value, self._made(value)))[1]

    def _note(self, value: Any, copied: Any) -> Any:
        """Before what it holds is copied, which may hold it."""
        self._known[id(value)] = (value, copied)
        return copied

    def _made(self, value: Any) -> Any:
        if isinstance(value, CONTAINERS):
            return self._container(value)
        if isinstance(value, (tuple, frozenset)):
            return self._fixed(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.CellType):
            copied = self._note(value, types.CellType())
            if in_cell(value) is not EMPTY:
                copied.cell_contents = self.of(value.cell_contents)
            return copied
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, types.BuiltinMethodType):
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if isinstance(value, functools.partial):
            made = type(value)(self.of(value.func), *self.of(value.args), **self.of(value.keywords))
            return self._with_attributes(value, made)
        if isinstance(value, functools._lru_cache_wrapper):
            return functools.lru_cache(**value.cache_parameters())(self.of(value.__wrapped__))
        if isinstance(value, weakref.ref):
            target = self.of(value())
            return value if target is value() else weakref.ref(target)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, (*GENERATORS, np.ndarray)):
            return copy.deepcopy(value)
        return self._object(value)

    def _container(self, value: Any) -> Any:
        """By the methods of the type it is derived from: some refuse to be changed (a frozen
        configuration)."""
        base: Any = next(one for one in (OrderedDict, *CONTAINERS) if isinstance(value, one))
        copied = self._note(value, base.__new__(type(value)))
        if isinstance(value, dict):
            if isinstance(value, defaultdict):
                copied.default_factory = self.of(value.default_factory)
            for key, one in list(value.items()):
                base.__setitem__(copied, self.of(key), self.of(one))
        else:
            room = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
            base.__init__(copied, [self.of(one) for one in value], **room)
        return self._with_attributes(value, copied)

    def _fixed(self, value: Any) -> Any:
        parts = [self.of(one) for one in value]
        if all(one is other for one, other in zip(parts, value, strict=True)):
            return value
        base = tuple if isinstance(value, tuple) else frozenset
        return self._with_attributes(value, base.__new__(type(value), parts))

    def _function(self, value: types.FunctionType) -> Any:
        cells = tuple(self.of(cell) for cell in value.__closure__ or ())
        defaults, named = self.of(value.__defaults__), self.of(value.__kwdefaults__)
        if not (cells or vars(value) or named) and defaults is value.__defaults__:
            return value
        copied: Any = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, defaults, cells or None
        )
        copied.__kwdefaults__ = named
        functools.update_wrapper(copied, value, updated=())
        del copied.__wrapped__
        return self._with_attributes(value, copied)

    def _object(self, value: Any) -> Any:
        if type(value) is object:
            return value  # a sign, known by its identity
        try:
            copied = object.__new__(type(value))
        except TypeError:
            return value  # of a type that is not written in Python
        copied = self._note(value, copied)
        for member in slots_of(value):
            if (one := in_slot(member, value)) is not EMPTY:
                member.__set__(copied, self.of(one))
        return self._with_attributes(value, copied)

    def _with_attributes(self, value: Any, copied: Any) -> Any:
        own = attributes_of(value)
        if own:
            vars(copied).update({name: self.of(one) for name, one in own.items()})
        return copied
