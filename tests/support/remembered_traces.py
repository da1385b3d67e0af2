"""Traces of models that are made once in a process that tests.

Most tests attach one of a dozen tiny models, and running it on fake tensors takes longer than
training it does. A trace is a function of the model's copy on fake tensors, of its inputs and of
how it is called. `_Described` writes all that down; where a part of it cannot be written down, or
the run drew from Python's or numpy's generators, the model is traced as it is for users. With
`--long` every model is.
"""

import io
import pickle
import random
import types
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lohan.engine.planning.label_watch import LabelWatch
from lohan.model.tracing.trace_model import Stretch, TraceableModel
from support import accelerator

_trace = TraceableModel.run


@dataclass(frozen=True)
class _Traced:
    """What a run gave, with names and numbers in place of a model's own objects."""

    stretches: tuple[Stretch, ...]
    blocks: tuple[int | None, ...]
    parameters: tuple[frozenset[int], ...]
    changed_buffers: tuple[str, ...]
    is_shared: bool
    counts_first: bool | None
    alive: tuple[Any, ...]
    """Objects whose ids are in the description."""


_TRACED: dict[bytes, _Traced] = {}
_NUM_REMEMBERED = 1000


class _CannotBeDescribedError(Exception):
    """A part that is not known to be alike is like nothing."""


class _Described(pickle.Pickler):
    """Equal bytes only for what runs alike: everything reachable, in order, each object once.

    Of fake tensors the kind and the value they stand for; of functions and classes which they are.
    """

    def __init__(self, into: io.BytesIO, traceable: TraceableModel) -> None:
        super().__init__(into, protocol=5)
        self.alive: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._values = {id(made): original for original, made in traceable.skeleton.others()}
        self._modules = {id(module): name for name, module in traceable.model.named_modules()}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, type):
            self.alive += [obj, code := getattr(obj, "forward", None)]
            return "class", id(obj), id(code)
        if isinstance(obj, nn.Module) and id(obj) in self._modules:
            return "module", self._modules[id(obj)]
        if isinstance(obj, types.FunctionType) and not obj.__closure__:
            self.alive.append(obj)
            return "function", id(obj), id(obj.__code__)
        if isinstance(obj, types.ModuleType | types.BuiltinFunctionType | torch.dtype):
            self.alive.append(obj)
            return "one of a kind", id(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):
            self.alive.append(obj.__code__)
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            return list, ([id(obj.__code__), obj.__defaults__, obj.__kwdefaults__, *cells],)
        if isinstance(obj, OrderedDict) and all(type(key) is int for key in obj):
            # Hooks of a module, by handles that are counted as they are given out.
            numbered = [(self._handles.setdefault(k, len(self._handles)), obj[k]) for k in obj]
            return list, (numbered,)
        return NotImplemented

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if id(tensor) in self._numbers:
            return self._numbers[id(tensor)]
        self.alive.append(tensor)
        self._numbers[id(tensor)] = len(self._numbers)
        value = self._values.get(id(tensor), tensor)
        is_known = type(value) is torch.Tensor and not value.is_meta
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8) if is_known else None
        return (
            type(tensor).__name__,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            None if content is None else content.numpy().tobytes(),
        )


def _description(
    traceable: TraceableModel, make_inputs: Any, point: Any, call: Any, watch: Any
) -> tuple[bytes, tuple[Any, ...]]:
    if watch is not nullcontext and not isinstance(getattr(watch, "__self__", None), LabelWatch):
        raise _CannotBeDescribedError
    into = io.BytesIO()
    described = _Described(into, traceable)
    with traceable._mode:
        inputs = make_inputs(*point)
    try:
        described.dump(
            (
                *(traceable.skeleton.module, inputs, call, traceable._call),
                *(watch is nullcontext, traceable.dtype, traceable.device),
                *(traceable.structures, [block.name for block in traceable.blocks]),
                *(traceable._should_assume_flash, traceable.is_shared),
                [*_numbered(traceable.model.parameters())],
                *(torch.is_autocast_enabled("cpu"), torch.get_default_dtype()),
                *(torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()),
            )
        )
    except (
        *(pickle.PicklingError, TypeError, AttributeError, ValueError),
        RuntimeError,  # also of modules that refuse to be pickled, and of endless recursion
    ) as error:
        raise _CannotBeDescribedError from error
    return into.getvalue(), tuple(described.alive)


def _numbered(parameters: Any) -> list[Any]:
    return [(tuple(one.shape), one.dtype, one.requires_grad) for one in parameters]


def _host_state() -> Any:
    kind, keys, *others = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), others


def _remembering(
    self: TraceableModel,
    make_inputs: Any,
    point: tuple[int, int],
    *,
    call: Any = None,
    watch: Callable[..., Any] = nullcontext,
) -> list[Stretch]:
    parameters = list(self.model.parameters())
    try:
        key, alive = _description(self, make_inputs, point, call, watch)
    except _CannotBeDescribedError:
        return _trace(self, make_inputs, point, call=call, watch=watch)
    known = _TRACED.get(key)
    if known is None:
        before = _host_state()
        stretches = _trace(self, make_inputs, point, call=call, watch=watch)
        if _host_state() == before and len(_TRACED) < _NUM_REMEMBERED:
            numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
            places = {id(block): number for number, block in enumerate(self.blocks)}
            _TRACED[key] = _Traced(
                tuple(replace(one, block=None, inside=set(), after=set()) for one in stretches),
                tuple(None if one.block is None else places[id(one.block)] for one in stretches),
                tuple(frozenset(numbers[known] for known in one.parameters) for one in stretches),
                self.changed_buffers,
                self.is_shared,
                None if watch is nullcontext else watch.__self__.counts_first,  # type: ignore[attr-defined]
                alive,
            )
        return stretches
    self.changed_buffers = known.changed_buffers
    if self.is_shared != known.is_shared:
        self.is_shared = known.is_shared
        self._copy({})
    if watch is not nullcontext:
        watch.__self__.counts_first = known.counts_first  # type: ignore[attr-defined]
    return [
        replace(
            stretch,
            block=None if place is None else self.blocks[place],
            parameters={id(parameters[number]) for number in owned},
        )
        for stretch, place, owned in zip(
            known.stretches, known.blocks, known.parameters, strict=True
        )
    ]


def remember_traces(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone. On the test accelerator a description would copy from a device, in
    the middle of what is tested there."""
    if not accelerator.is_loaded():
        patch.setattr(TraceableModel, "run", _remembering)
