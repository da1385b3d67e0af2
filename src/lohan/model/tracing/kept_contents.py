"""What is inside of things that a model holds, kept and put back: a run that is not the user's own
must leave no trace.

Owns telling whether a container, an object, a closure, a tensor or a generator has changed, and
undoing it. Which ones there are is up to `objects`. Used by tracing, and by `drive` around
forwards that count random numbers and blocks that are run again. Imports torch.
"""

import pickle
import random
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from lohan.errors import ConfigError
from lohan.model.tracing.objects import (
    CONTAINERS,
    EMPTY,
    GENERATORS,
    in_cell,
    in_slot,
    parts_that_change,
    slots_of,
)
from lohan.units import format_bytes

_LARGE_BYTES = 256 << 20
"""A larger tensor is not copied only because it might change."""

Kept = list[tuple[Any, Any]]
"""Things, and what was in them."""


@contextmanager
def left_as_found(*roots: Any) -> Iterator[None]:
    """Whatever runs inside, all that these values hold ends as it is now; the values of parameters
    are left alone.

    Raises:
        ConfigError: a tensor was changed of which no copy could be kept.
    """
    parts = parts_that_change(roots, enters_modules=True)
    before = [(one, content_of(one)) for one in parts if not isinstance(one, torch.Tensor)]
    tensors = [one for one in parts if isinstance(one, torch.Tensor) and _has_values(one)]
    copies = [(one, one.detach().clone()) for one in tensors if one.nbytes <= _LARGE_BYTES]
    large = [(one, one._version) for one in tensors if one.nbytes > _LARGE_BYTES]
    try:
        yield
    finally:
        for one, content in before:
            if not is_same(one, content):
                put_back(one, content)
        for one, value in copies:
            if not same_bits(one, value):
                put_value(one.detach(), value)
    changed = next((one for one, version in large if one._version != version), None)
    if changed is not None:
        raise ConfigError(
            f"a forward changes a tensor of {format_bytes(changed.nbytes)} in place, of shape "
            f"{tuple(changed.shape)}",
            why="a forward that only counts random numbers must leave it as it was, and no copy "
            f"is kept of more than {format_bytes(_LARGE_BYTES)}",
            remedy="make it a parameter, or give each step one micro-batch",
        )


def content_of(value: Any) -> Any:
    """What is in something; of a tensor only its version."""
    if isinstance(value, dict):  # as nearly always
        return list(value.items())
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, types.CellType):
        return [in_cell(value)]
    if isinstance(value, CONTAINERS):
        return list(value)
    return [in_slot(member, value) for member in slots_of(value)]


def is_same(value: Any, content: Any) -> bool:
    """Whether this is what is in something still: by identity where it holds other things."""
    if isinstance(value, dict):
        if not value or len(value) != len(content):  # most modules have no hooks
            return not value and not content
        pairs = zip(value.items(), content, strict=True)
        return all(key is old and one is other for (key, one), (old, other) in pairs)
    now = content_of(value)
    if isinstance(value, torch.Generator):
        return torch.equal(now, content)
    if isinstance(value, np.ndarray):
        return bool(np.array_equal(now, content, equal_nan=now.dtype.kind in "fc"))
    if isinstance(value, (torch.Tensor, random.Random)):
        return bool(now == content)
    if isinstance(value, GENERATORS):
        return pickle.dumps(now) == pickle.dumps(content)
    if len(now) != len(content):
        return False
    return all(one is other for one, other in zip(now, content, strict=True))


def put_back(value: Any, content: Any) -> None:
    """Undo what was changed; a tensor is left."""
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = content
    elif isinstance(value, np.random.RandomState):
        value.set_state(content)
    elif isinstance(value, np.ndarray):
        value[...] = content
    elif isinstance(value, types.CellType):
        _put_in_cell(value, content[0])
    elif isinstance(value, CONTAINERS):
        _fill(value, content)
    else:
        for member, one in zip(slots_of(value), content, strict=True):
            if one is not EMPTY:
                member.__set__(value, one)
            elif in_slot(member, value) is not EMPTY:
                member.__delete__(value)


def _put_in_cell(cell: types.CellType, content: Any) -> None:
    if content is not EMPTY:
        cell.cell_contents = content
    elif in_cell(cell) is not EMPTY:
        del cell.cell_contents


def _fill(value: Any, content: list[Any]) -> None:
    """By the methods of the type that it is derived from: its own may do more, or refuse."""
    base: Any = next(one for one in (OrderedDict, *CONTAINERS) if isinstance(value, one))
    base.clear(value)
    if isinstance(value, dict):
        for key, one in content:
            base.__setitem__(value, key, one)
    elif isinstance(value, (list, deque)):
        base.extend(value, content)
    else:
        base.update(value, content)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type are equal; NaNs are equal to themselves here."""
    return one.shape == other.shape and torch.equal(
        one.detach().contiguous().reshape(-1).view(torch.uint8),
        other.detach().contiguous().reshape(-1).view(torch.uint8),
    )


def put_value(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value into a buffer of the same shape, which may be an expanded tensor."""
    for dim, (size, stride) in enumerate(zip(buffer.shape, buffer.stride(), strict=True)):
        if size > 1 and stride == 0:
            # One place for all: torch refuses to write to it more than once.
            buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    with torch.no_grad():
        buffer.copy_(value)


def _has_values(tensor: torch.Tensor) -> bool:
    is_real = not (isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.is_inference())
    return is_real and tensor.layout is torch.strided
