"""Fake tensors that outlive a trace: somebody keeps them, and would compute with them for real.

The traced copy shares nothing with the model, but code may keep what it computes elsewhere: in a
global table, on a class, in a function's cache. Such a tensor has a shape and no values. Owns
noting what a trace makes, emptying caches that hold some of it, and naming who else does. Called by
`trace_model`. Imports torch.
"""

import functools
import gc
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lohan.errors import ConfigError
from lohan.model.tracing.trace_ops import storage_key

_MOST_STEPS = 1000
"""Of a search for a name, from holder to holder."""

_IN_CACHES = frozenset(("dict", "list", "tuple", "_lru_list_elem"))
"""Types of what lies between a function's cache and what the function gave."""


class MadeTensors:
    """The memory of tensors that came up in one trace; none of it is kept alive."""

    def __init__(self) -> None:
        self._noted: dict[int, StorageWeakRef] = {}

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """These came up; those with values are the user's."""
        for tensor in tensors:
            if type(tensor) is not FakeTensor:
                continue
            key = storage_key(tensor)
            known = self._noted.get(key)
            if known is None or known.expired():
                self._noted[key] = StorageWeakRef(tensor.untyped_storage())

    def refuse_left(self, model: str, own: Iterable[torch.Tensor]) -> None:
        """Nothing of it may be there any more, but what the copy itself consists of.

        Raises:
            ConfigError: somebody keeps a fake tensor.
        """
        expected = {storage_key(tensor) for tensor in own}
        if not self._left(expected):
            return
        gc.collect()  # What refers to itself goes only now.
        left = self._left(expected)
        if not left:
            return
        # Also among what a program has put out of sight (`gc.freeze`). It stays in sight: what is
        # put there now would never be collected.
        gc.unfreeze()
        _empty_caches(left)
        left = self._left(expected)
        if not left:
            return
        tensor = next((one for one in gc.get_objects() if _is_one_of(one, left)), None)
        where = "code that is not written in Python" if tensor is None else _holder(tensor)
        shape = "" if tensor is None else f" of shape {tuple(tensor.shape)}"
        raise ConfigError(
            f"{model} keeps a tensor{shape} that its forward made, in {where}",
            why="the forward was traced on tensors without values, and a later one would "
            "compute with this",
            remedy="keep it in an attribute of a module, make it before the forward, or call "
            "the model once with a small batch before attaching",
        )

    def _left(self, expected: set[int]) -> set[int]:
        return {
            key
            for key, memory in self._noted.items()
            if key not in expected and not memory.expired()
        }


def _is_one_of(value: Any, keys: set[int]) -> bool:
    # Not `isinstance`: it asks objects for their class, and some warn when they are asked.
    return type(value) is FakeTensor and storage_key(value) in keys


def _empty_caches(keys: set[int]) -> None:
    """Of functions: what they gave is computed again when it is asked for."""
    visited = set[int]()
    for cached in [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper]:
        if cached.cache_info().currsize and _holds(cached, keys, visited):
            cached.cache_clear()


def _holds(cached: Any, keys: set[int], visited: set[int]) -> bool:
    to_visit = list(gc.get_referents(cached))
    while to_visit:
        value = to_visit.pop()
        if _is_one_of(value, keys):
            return True
        if type(value).__name__ in _IN_CACHES and id(value) not in visited:
            visited.add(id(value))
            to_visit.extend(gc.get_referents(value))
    return False


def _holder(tensor: Any) -> str:
    """Who keeps it, in words: the nearest thing that has a name."""
    modules = {id(vars(one)): name for name, one in list(sys.modules.items()) if _is_module(one)}
    to_visit, visited = [tensor], {id(modules)}
    for value in to_visit:
        visited.add(id(value))
        for holder in gc.get_referrers(value):
            if id(holder) in visited or holder is to_visit or isinstance(holder, types.FrameType):
                continue
            if id(holder) in modules:
                names = [key for key, one in holder.items() if one is value]
                return f"{modules[id(holder)]}.{names[0] if names else '?'}"
            if isinstance(holder, type):
                return f"class {holder.__module__}.{holder.__qualname__}"
            if isinstance(holder, types.FunctionType):
                return f"function {holder.__module__}.{holder.__qualname__}"
            visited.add(id(holder))
            to_visit.append(holder)
        if len(to_visit) > _MOST_STEPS:
            break
    kinds = [type(one).__name__ for one in to_visit[1:4]]
    return " in ".join(kinds) or "a place that has no name"


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)
