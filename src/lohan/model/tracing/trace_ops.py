"""Record the operators a model runs: who reads whose memory, bytes, FLOPs, what autograd keeps.

Owns the dispatch mode and the rules for views and in-place operators. Does not know what blocks
are: `trace_model` tells it which segment is running. Runs on fake tensors, so storages are compared
by identity and nothing is computed. Imports torch.

Note "Which calls are counted": the ordinal of a call is its place among the calls of its segment
that `is_counted` accepts. Autograd dispatches `detach` when it keeps an output, so the same
forward has more of them with gradients than without; `prim` calls are questions about fake tensors.
Neither owns memory, and leaving them out makes ordinals equal in both passes. The engine counts
with the same function.

Note "In-place operators": a call that overwrites memory nobody has read since it was made takes the
place of the call that made it (its ordinal, its reads, its FLOPs added). If the old content was
read, both stay: the old and the overwritten content are different values, each with the memory's
size, which can only overstate.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lohan.errors import ConfigError
from lohan.model.tracing.flops import flops_of
from lohan.model.tracing.known_values import KnownValues

_ATEN = torch.ops.aten
_ASK = _ATEN._local_scalar_dense.default
_COUNT = _ATEN.bincount.default
# Of their first argument these read only what they return.
_READS_ONLY_ITS_RESULT = {_ATEN.embedding, _ATEN.gather, _ATEN.index, _ATEN.index_select}
# Of their first argument these look at the shape alone.
_READS_ONLY_A_SHAPE = {
    getattr(_ATEN, name)
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
}


def is_counted(call: Any) -> bool:
    """Say whether a dispatched call has an ordinal; see the note "Which calls are counted"."""
    return call.namespace != "prim" and call._overloadpacket is not _ATEN.detach


def storage_key(tensor: torch.Tensor) -> int:
    """Return what is equal for a tensor and its views, as long as one of them is alive."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, or of its memory where it is expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def what_to_differentiate(result: Any) -> torch.Tensor:
    """The loss in what a model returns, or its first output with a gradient."""
    tensors = [t for t in tensors_in(result) if t.requires_grad]
    if not tensors:
        raise ConfigError(
            "the model's output has no gradient",
            why="every parameter is frozen, or forward runs without gradients",
            remedy="set requires_grad on the parameters to train",
        )
    scalars = [tensor for tensor in tensors if tensor.dim() == 0]
    return (scalars or tensors)[0]


@contextmanager
def gradients_left(target: torch.Tensor) -> Iterator[None]:
    """Leave gradients as they are, whatever a backward pass from here adds: a loss may read tensors
    that are not the model's, and these must not keep a fake gradient."""
    to_visit = [target.grad_fn] if target.grad_fn is not None else []
    visited, before = set(to_visit), []
    while to_visit:
        node = to_visit.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            before.append((leaf, leaf.grad))
        for following, _ in node.next_functions:
            if following is not None and following not in visited:
                visited.add(following)
                to_visit.append(following)
    yield
    for leaf, gradient in before:
        leaf.grad = gradient


@dataclass(slots=True, eq=False)
class Call:
    """One operator call that owns memory. `reads` holds calls of its own segment only."""

    ordinal: int
    name: str
    segment: "Segment"
    output_bytes: dict[int, int]
    reads: list["Call"] = field(default_factory=list)
    reads_outside: bool = False
    forward_flops: int = 0
    backward_flops: int = 0
    touched_bytes: int = 0
    saved_keys: set[int] = field(default_factory=set)
    is_read: bool = False

    @property
    def operator(self) -> str:
        """The operator alone, without the module it ran in."""
        return self.name.rpartition("/")[2]


@dataclass(slots=True, eq=False)
class Segment:
    """A stretch of the forward pass: the embedding, one block, the head.

    Attributes:
        calls: those that own memory, by ordinal.
        num_calls: counted calls so far, views included.
        parameters: storage keys of the parameters it used.
        entering_bytes: tensors with a gradient it read from outside, by storage key.
        saves_parameters: autograd keeps parameters for its backward pass (a lookup keeps none).
    """

    calls: list[Call] = field(default_factory=list)
    num_calls: int = 0
    parameters: set[int] = field(default_factory=set)
    entering_bytes: dict[int, int] = field(default_factory=dict)
    saves_parameters: bool = False


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Records calls into `segment` while active; set `is_backward` before the backward pass.

    Every tensor it sees is kept alive until `forget`, so that no storage key is used twice.
    """

    def __init__(
        self,
        parameter_keys: set[int],
        buffer_keys: set[int],
        on_made: Callable[[list[torch.Tensor]], None] = lambda _: None,
        known: KnownValues | None = None,
    ) -> None:
        """`on_made` is told of every tensor that an operator returns."""
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._on_made = on_made
        self.known = known if known is not None else KnownValues()
        self.segment = Segment()
        self.path: list[str] = []
        self.is_backward = False
        self._parameter_keys = parameter_keys
        self._buffer_keys = buffer_keys
        self._owner: dict[int, Call] = {}
        self._call_of_node: dict[int, Call] = {}
        self._last_charged: Call | None = None
        self._alive: list[torch.Tensor] = []
        self._packed: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        answer: Any = None
        if func in (_ASK, _COUNT) and self.known.of(args[0]) is None:
            ordinary = self._ordinary_answer if func is _ASK else _ordinary_counts
            answer = ordinary(*args, **kwargs)
        result = self.known.run(func, args, kwargs) if answer is None else answer
        self._on_made(tensors_in(result))
        if is_counted(func):
            self._alive.extend(tensors_in(result))
            if self.is_backward:
                self._note_kept(func, args, kwargs)
                self._charge_backward(flops_of(func, args, kwargs, result))
            else:
                self._record(func, args, kwargs, result)
        return result

    def forget(self) -> None:
        """Let go of the tensors. Graphs that no backward went through hold this object too."""
        self._alive.clear()
        self.known.forget()

    def keep_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that autograd keeps this tensor (a pack hook). A block's input is not its output."""
        owner = self._owner.get(storage_key(tensor))
        self._packed.add(storage_key(tensor))
        if owner is not None and owner.segment is self.segment:
            owner.saved_keys.add(storage_key(tensor))
        self.segment.saves_parameters |= storage_key(tensor) in self._parameter_keys
        # Not the tensor itself: where it is an output, it and its operator would hold each other.
        with _disable_current_modes():
            kept = tensor.detach()
        value = self.known.of(tensor)
        if value is not None:
            self.known.note(kept, value)
        return kept

    def _note_kept(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Note what backward code reads of the forward without having saved it by autograd's rules:
        attributes of a Function's `ctx`, what a hook has closed over."""
        if func._overloadpacket in _READS_ONLY_A_SHAPE:
            return
        for tensor in tensors_in((args, kwargs)):
            key = storage_key(tensor)
            owner = self._owner.get(key)
            if owner is not None and key not in self._packed:
                owner.saved_keys.add(key)

    def made_here(self, tensor: torch.Tensor) -> bool:
        """Say whether the running segment made this tensor's memory."""
        owner = self._owner.get(storage_key(tensor))
        return owner is not None and owner.segment is self.segment

    def _ordinary_answer(self, tensor: torch.Tensor) -> bool | None:
        """Answer a model that asks about values, as ordinary inputs would.

        `if mask.all()` asks whether nothing is padded or packed, `if bad.any()` whether something
        is wrong, `if torch.rand([]) < rate` whether to leave a layer out. Other questions have no
        ordinary answer, and the tracing fails with them.
        """
        owner = self._owner.get(storage_key(tensor))
        if owner is None:
            return None
        if owner.operator == "lt":
            return False if [read.operator for read in owner.reads] == ["rand"] else None
        return {"all": True, "any": False}.get(owner.operator)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        segment = self.segment
        ordinal = segment.num_calls
        segment.num_calls += 1
        read, written = tensors_in((args, kwargs)), tensors_in(result)
        if func._overloadpacket in _READS_ONLY_A_SHAPE:
            read = []
        read_keys = {storage_key(tensor) for tensor in read}
        segment.parameters |= read_keys & self._parameter_keys
        overwritten = {storage_key(tensor) for tensor in overwritten_by(func, args, kwargs)}
        overwritten -= self._parameter_keys | self._buffer_keys
        made = {
            storage_key(tensor): tensor.untyped_storage().nbytes()
            for tensor in written
            if storage_key(tensor) not in read_keys
        }
        made |= {
            storage_key(tensor): tensor.untyped_storage().nbytes()
            for tensor in read
            if storage_key(tensor) in overwritten
        }
        if not made:
            return
        name = f"{'.'.join(self.path)}/{func._overloadpacket.__name__}".removeprefix("/")
        call = Call(ordinal=ordinal, name=name, segment=segment, output_bytes=made)
        for tensor in read:
            self._note_read(call, tensor)
        call.forward_flops = flops_of(func, args, kwargs, result)
        call.touched_bytes = _touched_bytes(func, read, written, made)
        self._absorb_overwritten(call, overwritten)
        segment.calls.append(call)
        for key in made:
            self._owner[key] = call
        # Autograd makes a node before it dispatches or runs a Function's forward, so the newest
        # number is the one of this call, or of a view or a Function that it is the first work of.
        node = torch._C._autograd._get_sequence_nr() - 1
        self._call_of_node.setdefault(node, call)

    def _note_read(self, call: Call, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key in self._parameter_keys or key in self._buffer_keys:
            return
        owner = self._owner.get(key)
        if owner is not None and owner.segment is call.segment:
            if owner not in call.reads:
                call.reads.append(owner)
            return
        call.reads_outside = True
        if tensor.requires_grad:
            call.segment.entering_bytes[key] = tensor_bytes(tensor)

    def _absorb_overwritten(self, call: Call, overwritten: set[int]) -> None:
        # See the note "In-place operators".
        for owner in list(call.reads):
            is_overwritten = overwritten >= owner.output_bytes.keys()
            if is_overwritten and not owner.is_read and not owner.saved_keys:
                call.reads.remove(owner)
                call.reads += [read for read in owner.reads if read not in call.reads]
                call.reads_outside |= owner.reads_outside
                call.forward_flops += owner.forward_flops
                call.touched_bytes += owner.touched_bytes
                call.name = f"{owner.name}+{call.operator}"
                call.segment.calls.remove(owner)
                for node, known in self._call_of_node.items():
                    if known is owner:
                        self._call_of_node[node] = call
            else:
                owner.is_read = True

    def _charge_backward(self, flops: int) -> None:
        if not flops:
            return
        node = torch._C._current_autograd_node()
        call = None if node is None else self._call_of_node.get(node._sequence_nr())
        # Work autograd does outside any known node (none so far) goes with what ran before it.
        call = call or self._last_charged
        if call is not None:
            call.backward_flops += flops
            self._last_charged = call


def overwritten_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Tensor arguments that the operator's schema says it writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from tensors_in(value)


def _touched_bytes(
    func: Any, read: list[torch.Tensor], written: list[torch.Tensor], made: dict[int, int]
) -> int:
    if func._overloadpacket in _READS_ONLY_ITS_RESULT:
        read = [*written, *read[1:]]
    result_bytes = sum(tensor_bytes(tensor) for tensor in written if storage_key(tensor) in made)
    return sum(tensor_bytes(tensor) for tensor in read) + result_bytes


def _ordinary_counts(
    values: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor | None:
    """As many counts as were asked for: no value is larger (experts a router chose from)."""
    if not minlength:
        return None
    return values.new_zeros(minlength, dtype=torch.int64 if weights is None else torch.float64)
