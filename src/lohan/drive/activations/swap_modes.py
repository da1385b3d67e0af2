"""The two dispatch modes around a block: one hands operator outputs to the activation store in
forward, the other puts them back in the re-run instead of computing them.

Owns the rules for what may be stored or skipped and how. Operators are numbered as in tracing
(`model.tracing.trace_ops`, "Which calls are counted"). Does not decide what is stored (the caller's
`BlockChoices`) nor where it goes (the caller's `ActivationStore`). Called by `block_run`.

Note "Changes in place". A stored value is the memory's content right after its operator. If a later
operator of the block is about to change that memory, the store gets a copy before it does (and
from then on at once). Where the stored operator is itself one that changes memory in place, the
store gets a copy, which the re-run copies into that memory instead of running the operator.

Note "Random operators". One that is stored or skipped is not run again, so the state of the
generators after it is noted in forward and set in its place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lohan.drive.activations.operator_rules import (
    SkippedValues,
    changed_in_place,
    reason_not_to_store,
)
from lohan.drive.surroundings.randomness import Generators, RandomState
from lohan.errors import ConfigError, ScheduleError
from lohan.model.tracing.trace_ops import is_counted, storage_key, tensors_in
from lohan.vocabulary import BlockId

ENTRY_ORDINAL = -1
"""Stands in an `ActivationKey` for a tensor with a gradient that entered the block; `output` then
counts what entered."""
SIDE_ORDINAL = -2
"""The same for a tensor without a gradient, which later blocks may ask for too."""


class ActivationKey(NamedTuple):
    """Which activation: output `output` of operator `ordinal` of one block and micro-batch."""

    micro_batch: int
    block: BlockId
    ordinal: int
    output: int


class ActivationStore(Protocol):
    """Where activations wait between forward and backward.

    A tensor given to `put` is not changed until it is dropped, so a store may keep it as it is or
    copy it in the background. `get` may be called several times before `drop`.
    """

    def put(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Take the tensor. Runs on the main thread, between two operators of the block."""

    def get(self, key: ActivationKey) -> torch.Tensor:
        """Give the tensor back, on the device it came from, with equal strides and bits.

        Content that its block changes in place later on may be changed in what is given.
        """

    def share(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """A later block needs this tensor, which was put, too: it will be asked for earlier than
        the other tensors of its block."""

    def drop(self, key: ActivationKey) -> None:
        """Forget the tensor, which may be changed from now on. Every key put is dropped once:
        after its last `get`, on failure, or to be put again with a copy."""


class KeepStore:
    """The choice KEEP: tensors stay where they are."""

    def __init__(self) -> None:
        self._tensors: dict[ActivationKey, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def put(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Hold on to the tensor."""
        if key in self._tensors:
            raise ScheduleError(
                f"{key} was put twice",
                why="the activation of the earlier call would be lost",
                remedy="report this: it is a mistake of lohan",
            )
        self._tensors[key] = tensor

    def get(self, key: ActivationKey) -> torch.Tensor:
        """The tensor itself."""
        return self._tensors[key]

    def share(self, key: ActivationKey, tensor: torch.Tensor) -> None:
        """Nothing to do: it is here all the time."""

    def drop(self, key: ActivationKey) -> None:
        """Let go of the tensor."""
        del self._tensors[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChoices:
    """What happens to the operator outputs of one block; those not named are recomputed.

    Attributes:
        stored: ordinals whose outputs go to the store and come back in the re-run.
        skipped: ordinals whose values no backward operator reads; the re-run makes an
            uninitialised tensor in their place.
        names: for some ordinals the operator expected there (`addmm`), to be checked.
        is_binding: whether a block with other operators is refused; if not, all of it is
            recomputed (its record then says `is_other`).
        should_poison: fill skipped outputs with NaN, to prove that nothing reads them.
        graph_bytes: all that backward reads stays on the device, this much for a micro-batch: the
            graph of the forward may be kept in place of outputs (`drive.kept_graph`).
    """

    stored: frozenset[int] = frozenset()
    skipped: frozenset[int] = frozenset()
    names: Mapping[int, str] = field(default_factory=dict)
    is_binding: bool = True
    should_poison: bool = False
    graph_bytes: int | None = None

    def __post_init__(self) -> None:
        both = self.stored & self.skipped
        if both:
            raise ConfigError(
                f"operators {sorted(both)} are both stored and skipped",
                why="a stored output is one that the re-run needs",
                remedy="leave each ordinal in one of the two sets",
            )

    @property
    def is_empty(self) -> bool:
        """Whether everything is recomputed."""
        return not (self.stored or self.skipped)


class _Shape(NamedTuple):
    """What is needed to make a tensor like one that was there."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Shape":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(slots=True, kw_only=True)
class _Noted:
    """What the re-run does in place of one operator."""

    outputs: list[Any]
    """By leaf of the result: a key in the store, a shape to make, or a plain value."""
    put_together: Callable[[list[Any]], Any]
    random_state: RandomState | None


@dataclass(slots=True, kw_only=True)
class ForwardRecord:
    """What the re-run of one block and micro-batch needs to know about its forward."""

    names: list[str] = field(default_factory=list)
    """Operators by ordinal: the re-run must dispatch the same ones."""
    noted: dict[int, _Noted] = field(default_factory=dict)
    keys: list[ActivationKey] = field(default_factory=list)
    answers: dict[int, Any] = field(default_factory=dict)
    """What operators told the block's code (`if x.isinf().any()`), to be told again."""
    is_other: bool = False
    """Operators are not those the choices were made for; everything is recomputed."""


class CaptureMode(TorchDispatchMode):
    """Forward of a block: hands chosen outputs to the store and notes what the re-run needs."""

    def __init__(
        self,
        *,
        block: BlockId,
        micro_batch: int,
        choices: BlockChoices,
        store: ActivationStore,
        generators: Generators,
        changed_later: set[int],
    ) -> None:
        """`changed_later` is the block's memory of ordinals to be copied at once; it grows here."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = ForwardRecord()
        self._block, self._micro_batch = block, micro_batch
        self._choices, self._store, self._generators = choices, store, generators
        self._changed_later = changed_later
        # What the store holds without a copy, by memory. The tensors are kept alive until the
        # block ends, so that no key of memory comes up again for other memory.
        self._shared: dict[int, list[tuple[ActivationKey, torch.Tensor]]] = {}
        self._skipped = SkippedValues()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_counted(func):
            return func(*args, **kwargs)
        ordinal = len(self.record.names)
        self.record.names.append(str(func))
        for tensor in changed_in_place(func, args, kwargs):
            self._copy_shared(storage_key(tensor))
        result = func(*args, **kwargs)
        if not func._schema.is_mutable and not tensors_in(result):
            self.record.answers[ordinal] = result
        if self.record.is_other or not self._is_as_expected(ordinal, func):
            return result
        is_skipped = ordinal in self._choices.skipped
        is_stored = ordinal in self._choices.stored
        if is_stored or is_skipped:
            self._note(ordinal, func, args, kwargs, result)
        elif ordinal in self._choices.names and self._skipped.are_read_by(
            func, args, kwargs, result
        ):
            self._refuse(
                f"operator {ordinal} ({func}) of block {self._block} is run again and reads an "
                "output that is not",
                "the block's operators are those the choices were made for, but read other tensors",
                "trace the model again and plan anew",
            )
        self._skipped.enter(func, args, kwargs, result, is_skipped=is_skipped, is_stored=is_stored)
        return result

    def _is_as_expected(self, ordinal: int, func: Any) -> bool:
        expected = self._choices.names.get(ordinal)
        if expected is None or expected == func._overloadpacket.__name__:
            return True
        self._refuse(
            f"operator {ordinal} of block {self._block} is {func} and {expected} was expected",
            "the choices were made for another block, model or library version",
            "trace the model again and plan anew",
        )
        return False

    def _refuse(self, what: str, why: str, remedy: str) -> None:
        """Choices that do not fit the block: an error, or all of it is recomputed."""
        if self._choices.is_binding:
            raise ConfigError(what, why=why, remedy=remedy)
        self.record.is_other = True
        self.record.noted.clear()

    def _copy_shared(self, memory: int) -> None:
        for key, tensor in self._shared.pop(memory, ()):
            self._changed_later.add(key.ordinal)
            self._store.drop(key)
            self._store.put(key, tensor.clone())

    def _note(
        self, ordinal: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        reason = reason_not_to_store(func, args, kwargs, result)
        if reason is not None:
            self._refuse(
                f"operator {ordinal} ({func}) of block {self._block} cannot be stored or skipped",
                reason,
                "leave it out of the choices; it is recomputed",
            )
            return
        if func._schema.is_mutable:
            # The memory may be older than the block (a buffer) and outlive it.
            self._changed_later.add(ordinal)
        leaves, spec = tree_flatten(result)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.record.noted[ordinal] = _Noted(
            outputs=[self._note_output(ordinal, i, leaf) for i, leaf in enumerate(leaves)],
            put_together=spec.unflatten,
            random_state=self._generators.state() if is_random else None,
        )

    def _note_output(self, ordinal: int, index: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if ordinal in self._choices.skipped:
            return _Shape.of(leaf)
        key = ActivationKey(self._micro_batch, self._block, ordinal, index)
        if ordinal in self._changed_later:
            value = leaf.clone()
        else:
            # A name of its own: the tensor that goes up from here becomes part of a graph.
            value = leaf.detach()
            self._shared.setdefault(storage_key(value), []).append((key, value))
        self._store.put(key, value)
        self.record.keys.append(key)
        return key

    def shares_memory_with_stored(self, tensor: torch.Tensor) -> bool:
        """Whether changing `tensor` in place would change something the store holds."""
        return storage_key(tensor) in self._shared

    def finish(self) -> ForwardRecord:
        """Check that every chosen operator was there, and let go of the stored tensors."""
        missing = (self._choices.stored | self._choices.skipped) - self.record.noted.keys()
        if not self._choices.is_binding:
            # Code between two blocks is traced as the end of the first, and runs outside of it.
            missing -= set(range(len(self.record.names), max(missing, default=0) + 1))
        if missing and not self.record.is_other:
            self._refuse(
                f"block {self._block} has {len(self.record.names)} operators, and the choices "
                f"name {sorted(missing)}",
                "the choices were made for another block, model or library version",
                "trace the model again and plan anew",
            )
        self._shared.clear()
        return self.record


class ReplayMode(TorchDispatchMode):
    """Re-run of a block: stored outputs come from the store, skipped ones are not computed."""

    def __init__(
        self,
        *,
        block: BlockId,
        choices: BlockChoices,
        store: ActivationStore,
        generators: Generators,
        forward: ForwardRecord,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block, self._choices, self._forward = block, choices, forward
        self._store, self._generators = store, generators
        self._ordinal = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_counted(func):
            return func(*args, **kwargs)
        ordinal, name, names = self._ordinal, str(func), self._forward.names
        if ordinal >= len(names) or names[ordinal] != name:
            self._refuse_other_operators(ordinal, name)
        self._ordinal += 1
        if ordinal in self._forward.answers:
            return self._forward.answers[ordinal]
        noted = self._forward.noted.get(ordinal)
        if noted is None:
            return func(*args, **kwargs)
        if noted.random_state is not None:
            self._generators.set_state(noted.random_state)
        written = changed_in_place(func, args, kwargs)
        if written:
            return self._write(written[0], noted.outputs[0])
        return noted.put_together([self._make(leaf) for leaf in noted.outputs])

    def _make(self, leaf: Any) -> Any:
        if isinstance(leaf, ActivationKey):
            # Autograd will hang the graph on what is returned here, so it must be a new name.
            return self._store.get(leaf).detach()
        if isinstance(leaf, _Shape):
            return self._poisoned(leaf.make())
        return leaf

    def _write(self, memory: torch.Tensor, leaf: Any) -> torch.Tensor:
        if isinstance(leaf, ActivationKey):
            return memory.copy_(self._store.get(leaf))
        return self._poisoned(memory)

    def _poisoned(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._choices.should_poison:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        return tensor

    def _refuse_other_operators(self, ordinal: int, name: str) -> None:
        names = self._forward.names
        then = names[ordinal] if ordinal < len(names) else "nothing"
        raise ScheduleError(
            f"operator {ordinal} of block {self._block} was {then} in forward and is {name} in "
            "the re-run",
            why="stored outputs are put back by number, and these numbers no longer agree",
            remedy="make the block's forward depend on its inputs only, or recompute all of it",
        )

    def finish(self) -> None:
        """Check that the re-run dispatched as many operators as the forward."""
        if self._ordinal != len(self._forward.names):
            self._refuse_other_operators(self._ordinal, "nothing")
