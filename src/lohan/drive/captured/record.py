"""A block's forward and backward as one list of operator calls.

Owns the recording: the block's own code is run once on fake tensors, so that whatever reads a value
on its way is refused (`NotCapturable`) instead of being taken for a constant. Nothing fake may stay
behind: the caller puts back what the block holds. Knows nothing of plans; see `cut`.

Note "Values and storages". A value is a tensor as one call made it; views and in-place results are
values on the storage of another one. A call that only returns a view reads no numbers. Contents
belong to storages: backward calls run after all forward calls, so they read final contents. A view
that lies as a value before it does is that value (`_without_repeated_views`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from lohan.drive.surroundings.host_randomness import host_state_kept
from lohan.drive.surroundings.randomness import may_draw
from lohan.model.tracing.kept_contents import left_as_found
from lohan.model.tracing.trace_ops import (
    is_counted,
    overwritten_by,
    storage_key,
    tensors_in,
)

_ATEN = torch.ops.aten
_SAME = (_ATEN.detach.default, _ATEN.alias.default)
_LIFT = _ATEN.lift_fresh.default


class NotCapturable(Exception):
    """Why a block cannot be run as a graph; it is then run as it is."""


class Value(int):
    """A tensor of a graph, by number."""


@dataclass(slots=True)
class Call:
    """One operator call. Tensors in its arguments are `Value`s."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    """Of each of its results; None for those that it was given, and for what is no tensor."""
    is_single: bool
    """It returns one tensor, not several."""
    is_view: bool
    """It looks at no numbers: all that it returns lies on a storage it was given."""
    is_random: bool
    ordinal: int | None
    """Place among the counted calls of the forward; None in backward."""


@dataclass(slots=True)
class Recording:
    """All calls of a block, in order."""

    calls: list[Call] = field(default_factory=list)
    num_forward: int = 0
    storages: list[int] = field(default_factory=list)
    """Of each value, by number; storages are numbered as well."""
    num_bytes: list[int] = field(default_factory=list)
    """Of each storage."""
    num_given: int = 0
    """The first values: parameters, buffers and tensors that both functions are given."""
    starts: list[Value] = field(default_factory=list)
    """Gradients that backward is given besides. Numbered behind all values of the forward, whose
    numbers are the same whatever arrives."""
    constants: dict[Value, torch.Tensor] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    """Leaves of what the block returns: a `Value`, or what is no tensor."""
    spec: Any = None
    with_gradient: list[bool] = field(default_factory=list)
    """Whether each of these leaves requires one."""
    gradients: list[Value | None] = field(default_factory=list)
    """Results of the backward, in the order they were asked for."""


class _Recorder(TorchDispatchMode):
    """Writes down what is dispatched; all tensors stay alive, so that none is taken for another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Recording()
        self.is_backward = False
        self._is_lifting = False
        self._num_counted = 0
        self._value_of: dict[int, Value] = {}
        self._storage_of: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._first_at: dict[Hashable, Value] = {}
        """By where it lies: storage, shape, strides."""
        self.repeated: dict[Value, Value] = {}
        """Views that lie where a value before them does, and that one."""

    def give(self, tensor: torch.Tensor) -> Value:
        """A tensor that the functions are given."""
        return self._add(tensor)

    def give_real(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """The same for one that stays real: operators see it as `fake`, and make views of that."""
        value = self._add(tensor)
        self._storage_of[storage_key(fake)] = self.found.storages[value]
        self._alive.append(fake)
        self._first_at.setdefault(self._place_of(fake), value)

    def knows(self, tensor: torch.Tensor) -> Value | None:
        return self._value_of.get(id(tensor))

    def _add(self, tensor: torch.Tensor) -> Value:
        found = self.found
        value = Value(len(found.storages))
        key = storage_key(tensor)
        if key not in self._storage_of:
            self._storage_of[key] = len(found.num_bytes)
            found.num_bytes.append(tensor.untyped_storage().nbytes())
        found.storages.append(self._storage_of[key])
        self._value_of[id(tensor)] = value
        self._alive.append(tensor)
        first = self._first_at.setdefault(self._place_of(tensor), value)
        if first != value:
            self.repeated[value] = first
        return value

    def _place_of(self, tensor: torch.Tensor) -> Hashable:
        return (
            self._storage_of[storage_key(tensor)],
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotCapturable(f"{func} makes what follows depend on numbers") from error
        if func.namespace == "prim":
            return result
        ordinal = None
        if not self.is_backward and is_counted(func):
            ordinal = self._num_counted
            self._num_counted += 1
        made = tensors_in(result)
        if func in _SAME:
            self._value_of[id(result)] = self._read(args[0])
            self._alive.append(result)
            return result
        if not made:
            if func._schema.is_mutable:
                raise NotCapturable(f"{func} returns nothing")
            return result  # of a constant: on anything else fake tensors refuse
        self._note(func, args, kwargs, result, made, ordinal)
        return result

    def _read(self, tensor: torch.Tensor) -> Value:
        value = self._value_of.get(id(tensor))
        if value is None:
            if isinstance(tensor, FakeTensor):
                raise NotCapturable("it reads a tensor of unknown origin")
            if not self._is_lifting:
                raise NotCapturable(
                    f"it reads a tensor of shape {tuple(tensor.shape)} that is neither an argument "
                    "nor a parameter or buffer of its own"
                )
            value = self._add(tensor)
            self.found.constants[value] = tensor
        return value

    def _note(
        self, func: Any, args: Any, kwargs: Any, result: Any, made: Any, ordinal: int | None
    ) -> None:
        read = tensors_in((args, kwargs))
        self._is_lifting = func is _LIFT
        named = tree_map(
            lambda leaf: self._read(leaf) if isinstance(leaf, torch.Tensor) else leaf,
            (args, kwargs),
        )
        reads = tuple(self._read(tensor) for tensor in read)
        before = {self.found.storages[value] for value in reads}
        writes = tuple(self._read(tensor) for tensor in overwritten_by(func, args, kwargs))
        outputs: list[Value | None] = []
        for one in [result] if isinstance(result, torch.Tensor) else result:
            if isinstance(one, (list, tuple)):
                raise NotCapturable(f"{func} returns lists of tensors")
            # What is known already was changed in place.
            is_new = isinstance(one, torch.Tensor) and id(one) not in self._value_of
            outputs.append(self._add(one) if is_new else None)
        self.found.calls.append(
            Call(
                # A constant of the block's code: its own memory each time, as when it is made anew.
                operator=_ATEN.clone.default if func is _LIFT else func,
                args=named[0],
                kwargs=named[1],
                reads=reads,
                writes=writes,
                outputs=tuple(outputs),
                is_single=isinstance(result, torch.Tensor),
                is_view=not writes
                and all(self._storage_of[storage_key(tensor)] in before for tensor in made),
                is_random=_is_random(func, args, kwargs),
                ordinal=ordinal,
            )
        )


def _is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    is_random = may_draw(func, args, kwargs)
    for position, argument in enumerate(func._schema.arguments) if is_random else ():
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.name == "generator" and value is not None:
            raise NotCapturable("it draws from a random generator of its own")
    return is_random


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a block was called with, and what its backward started from."""

    leaves: Sequence[Any]
    spec: TreeSpec
    tensors: Sequence[torch.Tensor]
    """The distinct tensors among the leaves."""
    requires_grad: Sequence[bool]
    """Of each of them, in the model's graph."""
    parameters: Sequence[torch.nn.Parameter]
    buffers: Sequence[torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Arrived:
    """Gradients that a backward of a block starts from; None where there is none."""

    of_tensors: Sequence[torch.Tensor | None]
    """Sums so far, of each distinct argument."""
    of_outputs: Sequence[torch.Tensor | None]
    """Of each leaf of what the block returned."""
    of_parameters: Sequence[torch.Tensor | None]
    """Sums so far."""

    @property
    def pattern(self) -> tuple[bool, ...]:
        """Which of them there are."""
        everything = (*self.of_tensors, *self.of_outputs, *self.of_parameters)
        return tuple(one is not None for one in everything)

    def present(self) -> list[torch.Tensor]:
        """Those there are, in this order."""
        everything = (*self.of_tensors, *self.of_outputs, *self.of_parameters)
        return [one for one in everything if one is not None]

    def forget(self) -> None:
        """Hold none of them any longer."""
        self.of_tensors = self.of_outputs = self.of_parameters = ()


def record(
    forward: Callable[..., Any], module: torch.nn.Module, given: Arguments, arrived: Arrived
) -> Recording:
    """Run a block forward and backward on fake tensors and write its calls down.

    `gradients` of the result are of the tensors with one, then of the parameters that are trained.

    Raises:
        NotCapturable: its code depends on numbers, or cannot run on fake tensors.
    """
    objects = [leaf for leaf in given.leaves if not isinstance(leaf, torch.Tensor)]
    recorder, mode = _Recorder(), FakeTensorMode(allow_non_fake_inputs=True)
    with left_as_found(module, objects), host_state_kept():
        try:
            _run(forward, given, arrived, recorder, mode)
        except NotCapturable:
            raise
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            raise NotCapturable(f"its code does not run on fake tensors ({first[:200]})") from error
    return _without_repeated_views(recorder.found, recorder.repeated)


def _without_repeated_views(found: Recording, repeated: Mapping[Value, Value]) -> Recording:
    """The weight that is transposed twice, the input that is flattened for each of its readers: a
    view costs as much time of the host as a small operator. What the block returns stays a tensor
    of its own."""
    if any(torch.Tag.inplace_view in call.operator.tags for call in found.calls):
        return found  # a value does not stay where it lies
    same = {
        value: first
        for call in found.calls
        if call.is_view and call.is_single
        for value in call.outputs
        if value is not None
        and (first := repeated.get(value)) is not None
        and value not in found.outputs
    }

    def known(leaf: Any) -> Any:
        return same.get(leaf, leaf) if isinstance(leaf, Value) else leaf

    calls = []
    num_forward = found.num_forward
    for place, call in enumerate(found.calls):
        if same.keys() & call.outputs:
            found.num_forward -= place < num_forward
            continue
        args, kwargs = tree_map(known, (call.args, call.kwargs))
        reads = tuple(map(known, call.reads))
        writes = tuple(map(known, call.writes))
        calls.append(replace(call, args=args, kwargs=kwargs, reads=reads, writes=writes))
    found.calls = calls
    found.gradients = [known(gradient) for gradient in found.gradients]
    return found


def _run(
    forward: Callable[..., Any],
    given: Arguments,
    arrived: Arrived,
    recorder: _Recorder,
    mode: FakeTensorMode,
) -> None:
    for tensor in (*given.parameters, *given.buffers):
        recorder.give_real(tensor, mode.from_tensor(tensor))
    fakes = [
        mode.from_tensor(tensor.detach()).detach().requires_grad_(needs)
        for tensor, needs in zip(given.tensors, given.requires_grad, strict=True)
    ]
    starts = [mode.from_tensor(tensor.detach()) for tensor in arrived.present()]
    for fake in fakes:
        recorder.give(fake)
    found = recorder.found
    found.num_given = len(found.storages)
    fake_of = {id(tensor): fake for tensor, fake in zip(given.tensors, fakes, strict=True)}
    args, kwargs = tree_unflatten(
        [fake_of.get(id(leaf), leaf) for leaf in given.leaves], given.spec
    )
    with mode, recorder:
        raw = forward(*args, **kwargs)
        leaves, found.spec = tree_flatten(raw)
        found.outputs = [_output(leaf, recorder) for leaf in leaves]
        found.with_gradient = [
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
        ]
        found.num_forward = len(found.calls)
        recorder.is_backward = True
        found.starts = [recorder.give(start) for start in starts]
        possible = [*fakes, *leaves, *given.parameters]
        places = [place for place, there in enumerate(arrived.pattern) if there]
        wanted = [one for one in (*fakes, *given.parameters) if one.requires_grad]
        gradients = torch.autograd.grad(
            [possible[place] for place in places], wanted, starts, allow_unused=True
        )
    found.gradients = [
        None if gradient is None else recorder.knows(gradient) for gradient in gradients
    ]
    if any(g is not None and v is None for g, v in zip(gradients, found.gradients, strict=True)):
        raise NotCapturable("a gradient comes from no operator")


def _output(leaf: Any, recorder: _Recorder) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if not isinstance(leaf, bool | int | float | str | None):
            raise NotCapturable(f"it returns a {type(leaf).__name__}")
        return leaf
    value = recorder.knows(leaf)
    if value is None:
        raise NotCapturable("it returns a tensor that no operator made")
    return value
