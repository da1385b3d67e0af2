"""Trace a whole module once per kind of block and turn it into a `ModelShape`.

Owns the run: which segment is running, which blocks need running at all (one of each kind; the
others hand their input on), and the merging of several points into growths. Finding blocks, copying
the module and recording calls are elsewhere. Imports torch; called by `names` on demand.

Note "Segments": the embedding is what runs before the first block, the head (with the loss) what
runs after the last one. What runs between two blocks of a list belongs to the earlier one; what
runs between two lists (an encoder and a decoder) is a block of its own, a bridge.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from lohan.errors import ConfigError
from lohan.model.tracing.blocks import FoundBlock, find_blocks, structure_of
from lohan.model.tracing.kept_contents import left_as_found
from lohan.model.tracing.known_values import KnownValues, PythonValues
from lohan.model.tracing.left_behind import MadeTensors
from lohan.model.tracing.skeleton import Skeleton, replace_forward
from lohan.model.tracing.trace_ops import (
    OperatorRecorder,
    Segment,
    gradients_left,
    storage_key,
    tensor_bytes,
    tensors_in,
    what_to_differentiate,
)
from lohan.model.tracing.trace_pretence import (
    FlashAttention,
    as_if_real,
    explained,
    quiet,
    repetition,
)

MakeInputs = Callable[[int, int], dict[str, Any]]
"""Makes the keyword arguments of `forward` for a batch and a sequence length."""

Call = Callable[[nn.Module, dict[str, Any]], Any]
"""Runs a model on inputs; returns its loss, or an output that has one."""

Watch = Callable[[dict[str, Any]], AbstractContextManager[Any]]
"""Looks on while a model runs on these inputs."""


def _plain_call(model: nn.Module, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


@dataclass(slots=True, eq=False)
class Stretch:
    """One block of the model as it was met: a recorded segment, or a repetition of one.

    Attributes:
        label: `embedding`, `head`, `bridge`, or the path of the block's list.
        segment: what ran; of the first of its kind for a repetition.
        block: the block, or None for what runs outside blocks.
        num_tokens: length of the sequence dimension of the tensor it received.
        side_bytes: of what runs outside blocks, tensors without a gradient that go to the blocks
            behind it.
        inside, after: storage keys of the parameters that a block used, and those that code
            between it and the next one used.
    """

    label: str
    segment: Segment
    block: FoundBlock | None = None
    input_bytes: int = 0
    output_bytes: int = 0
    num_tokens: int | None = None
    side_bytes: int = 0
    inside: set[int] = field(default_factory=set)
    after: set[int] = field(default_factory=set)
    parameters: set[int] = field(default_factory=set)
    is_used: bool = True


class TraceableModel:
    """A model made ready to be traced at any number of points; the model itself is not touched.

    Args:
        model: on any device; only its structure is used.
        dtype: of compute weights and activations.
        device: whose operators to trace.
        should_assume_flash: take attention for fused even where the device would not (dropout).
        call: how to run it; as `model(**inputs)` unless told.

    Raises:
        ConfigError: if it has no blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        device: torch.device,
        should_assume_flash: bool,
        call: Call | None = None,
    ) -> None:
        self.model, self.dtype, self.device = model, dtype, device
        self.blocks = find_blocks(model)
        self.structures = {block.name: structure_of(block) for block in self.blocks}
        self._should_assume_flash = should_assume_flash
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        firsts: dict[object, nn.Module] = {}
        alike: dict[int, nn.Module] = {}
        for block in self.blocks:
            first = firsts.setdefault(self.structures[block.name], block.module)
            if first is not block.module:
                alike[id(block.module)] = first
        self.changed_buffers: tuple[str, ...] = ()
        """By their names, of the last run."""
        self.is_shared = bool(alike)
        """Whether one copy stands for several blocks."""
        self._call = call if call is not None else _plain_call
        self._copy(alike)

    def _copy(self, alike: dict[int, nn.Module]) -> None:
        with self._mode:
            self.skeleton = Skeleton(self.model, self.dtype, self.device, alike)

    def run(
        self,
        make_inputs: MakeInputs,
        point: tuple[int, int],
        *,
        call: Call | None = None,
        watch: Watch = nullcontext,
    ) -> list[Stretch]:
        """Run forward and backward at one batch and sequence length, on fake tensors.

        Args:
            call: another one than it was made with.
            watch: is entered with the inputs around the call, and lets go of them after it.

        Returns:
            The model's blocks in the order they ran.

        Raises:
            ConfigError: if it cannot run on fake tensors, uses no block, or leaves fake tensors
                behind.
        """
        how = _Run(make_inputs, point, call if call is not None else self._call, watch)
        try:
            return self._run(how, is_as_if_real=True)
        except ConfigError as error:
            if not isinstance(error.__cause__, DataDependentOutputException):
                raise
        # The model looks into a mask. Then let it build masks in full, as it does for real ones.
        return self._run(how, is_as_if_real=False)

    def _on_device(self, known: KnownValues, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        fake = torch.empty_like(leaf, device=self.device)
        value = known.of(leaf)
        if value is not None:
            known.note(fake, value)
        return fake

    def _run(self, how: "_Run", *, is_as_if_real: bool) -> list[Stretch]:
        made = MadeTensors()
        with self._mode:
            copied = replace(how, call=self.skeleton.copied(how.call))
        # The next run starts from the model as it is, and nothing keeps what this one made.
        with left_as_found(self.skeleton.module, copied.call):
            stretches = self._run_once(copied, made, is_as_if_real=is_as_if_real)
        made.refuse_left(type(self.model).__name__, self.skeleton.tensors())
        if stretches is None:
            # Code outside the blocks reads weights of one: with copies of their own, of which.
            self.is_shared = False
            self._copy({})
            return self._run(how, is_as_if_real=is_as_if_real)
        return _without_empty_bridges(stretches)

    def _run_once(
        self, how: "_Run", made: MadeTensors, *, is_as_if_real: bool
    ) -> list[Stretch] | None:
        """None if it must be run again with a copy of every block."""
        with self._mode:
            known = KnownValues(self.skeleton.others())
            inputs = tree_map(partial(self._on_device, known), how.make_inputs(*how.point))
            made.note(tensors_in(inputs))
            tracer = _Tracer(self, made, known)
            hooks = torch.autograd.graph.saved_tensors_hooks(
                tracer.recorder.keep_saved, lambda tensor: tensor
            )
            fused = FlashAttention() if self._should_assume_flash else nullcontext()
            pretence = as_if_real() if is_as_if_real else nullcontext()
            try:
                with (
                    explained(self.model, lambda: tracer.stopped_in),
                    quiet(),
                    pretence,
                    torch.enable_grad(),
                ):
                    values = PythonValues(known)
                    with fused, values, hooks, tracer.recorder, how.watch(inputs):
                        result = how.call(self.skeleton.module, inputs)
                    with tracer.recorder:
                        tracer.finish(result)
            finally:
                tracer.recorder.forget()
                self.skeleton.module.zero_grad(set_to_none=True)
        self.changed_buffers = tracer.changed_buffers()
        is_outside = tracer.assign_parameters()
        return None if is_outside and self.is_shared else tracer.stretches


@dataclass(frozen=True, slots=True)
class _Run:
    make_inputs: MakeInputs
    point: tuple[int, int]
    call: Call
    watch: Watch


class _Tracer:
    """Follows the copy of a model from block to block through one run."""

    def __init__(self, traceable: TraceableModel, made: MadeTensors, known: KnownValues) -> None:
        self._traceable = traceable
        self._skeleton = traceable.skeleton
        self._blocks = traceable.blocks
        # As they are now: a forward may put other memory in the place of a weight's.
        self._key_to_id = {storage_key(fake): i for i, fake in self._skeleton.fake_of.items()}
        parameters = set(self._key_to_id)
        # Kept: a forward may put others in their places, and no storage key may be used twice.
        self._buffers = list(self._skeleton.module.buffers())
        self._buffer_versions = self._versions()
        buffers = {storage_key(buffer) for buffer in self._buffers}
        self.recorder = OperatorRecorder(parameters, buffers - parameters, made.note, known)
        self._lasting = parameters | buffers
        self.stretches = [Stretch(label="embedding", segment=self.recorder.segment)]
        # The first block of each kind, and for each of its outputs the input that stands in for it.
        self._seen: dict[object, tuple[Stretch, Callable[[list[Any]], Any] | None]] = {}
        self._ran: set[str] = set()
        self.stopped_in = ""
        self._follow_paths()

    def _versions(self) -> dict[str, tuple[int, int]]:
        named = self._skeleton.module.named_buffers()
        return {name: (id(one), one._version) for name, one in named}

    def changed_buffers(self) -> tuple[str, ...]:
        """Those that the run has written to, or put others in the place of."""
        now = self._versions()
        return tuple(n for n, one in now.items() if self._buffer_versions.get(n) != one)

    def _follow_paths(self) -> None:
        names: dict[int, str] = {}
        for block in self._blocks:
            for name, module in self._copy(block).named_modules():
                names.setdefault(id(module), name)
        for name, module in self._skeleton.module.named_modules():
            replace_forward(module, self._with_path(names.get(id(module), name)))
        for block in self._blocks:
            replace_forward(self._copy(block), self._as_block(block))

    def _copy(self, block: FoundBlock) -> nn.Module:
        return self._skeleton.copy_of[id(block.module)]

    def _with_path(self, name: str) -> Callable[..., Any]:
        def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            outer, self.recorder.path = self.recorder.path, [name] if name else []
            try:
                return forward(*args, **kwargs)
            except Exception:
                self.stopped_in = self.stopped_in or name
                raise
            finally:
                self.recorder.path = outer

        return around

    def _as_block(self, block: FoundBlock) -> Callable[..., Any]:
        def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if block.name in self._ran:
                raise ConfigError(
                    f"block {block.name} runs twice in one forward pass",
                    why="its weights would have to be in two places of the schedule at once",
                    remedy="give every layer a module of its own",
                )
            self._ran.add(block.name)
            self._leave(args, kwargs)
            entering = tensors_in((args, kwargs))
            self._note_sides(entering)
            structure = self._traceable.structures[block.name]
            kind = (structure, block.list_name, tuple(_look(t) for t in entering))
            first, repeat = self._seen.get(kind, (None, None))
            if first is not None and repeat is not None:
                segment, result = Segment(), repeat(tree_leaves((args, kwargs)))
                self.recorder.segment = segment
            else:
                segment = self.recorder.segment = Segment()
                outer, self.recorder.path = self.recorder.path, []
                try:
                    result = forward(*args, **kwargs)
                except Exception:
                    inner = f", in {self.stopped_in}" if self.stopped_in else ""
                    self.stopped_in = f"block {block.name}{inner}"
                    raise
                self.recorder.path = outer
            stretch = Stretch(label=block.list_name, segment=segment, block=block)
            if first is not None:
                # The first of the kind speaks for it; what this one ran besides is the same.
                stretch.segment = first.segment
            # Code between two blocks runs while the first is there, and back with the second.
            stretch.inside, segment.parameters = segment.parameters, stretch.after
            if first is not None:
                stretch.inside |= first.inside
            stretch.input_bytes = _distinct_bytes(t for t in entering if t.requires_grad)
            stretch.output_bytes = _distinct_bytes(
                t for t in tensors_in(result) if t.is_floating_point()
            )
            stretch.num_tokens = _num_tokens(entering)
            if first is None:
                self._seen[kind] = (stretch, repetition((args, kwargs), result))
            self.stretches.append(stretch)
            if block.is_last:
                self.recorder.segment = Segment()
                self.stretches.append(Stretch(label="bridge", segment=self.recorder.segment))
            return result

        return around

    def _note_sides(self, entering: list[torch.Tensor]) -> None:
        """Charge what enters without a gradient, the first time, to the code in front."""
        rest = next(stretch for stretch in reversed(self.stretches) if stretch.block is None)
        for tensor in entering:
            key = storage_key(tensor)
            if not tensor.requires_grad and key not in self._lasting:
                self._lasting.add(key)
                rest.side_bytes += tensor.untyped_storage().nbytes()

    def _leave(self, args: Any, kwargs: Any) -> None:
        last = self.stretches[-1]
        if last.block is not None:
            return
        floats = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
        made_here = [t for t in floats if self.recorder.made_here(t)]
        last.output_bytes = _distinct_bytes([t for t in made_here if t.requires_grad] or made_here)
        last.input_bytes = sum(last.segment.entering_bytes.values())

    def finish(self, result: Any) -> None:
        """Close the head after the forward pass and run the backward pass."""
        target = what_to_differentiate(result)
        last = self.stretches[-1]
        if last.block is not None:
            last = Stretch(label="head", segment=Segment())
            self.stretches.append(last)
        last.label = "head"
        last.input_bytes = sum(last.segment.entering_bytes.values())
        last.output_bytes = tensor_bytes(target)
        self.recorder.is_backward = True
        with gradients_left(target):
            torch.autograd.backward(target, torch.ones_like(target))
        self._add_unused()

    def _add_unused(self) -> None:
        """Blocks that did not run (a tower for pictures, and there are none) get their place: after
        the one in front of them, or after the embedding."""
        if not self._ran:
            raise ConfigError(
                f"none of the {len(self._blocks)} blocks ran, {self._blocks[0].name} the first",
                why="what the model needs cannot be told from a forward pass without them",
                remedy="pass inputs that use the model",
            )
        ran = {one.block.list_name: one for one in self.stretches if one.block is not None}
        after = 0
        for block in self._blocks:
            places = [n for n, one in enumerate(self.stretches) if one.block is block]
            if places:
                # What follows the last block of a list that ran is a rest, with weights of its own.
                is_last = ran[block.list_name].block is block
                after = 0 if is_last else places[0]
                continue
            after += 1
            unused = Stretch(label=block.list_name, segment=Segment(), block=block, is_used=False)
            self.stretches.insert(after, unused)

    def assign_parameters(self) -> bool:
        """Give every stretch the ids of the original parameters it uses, the unused ones too; tell
        whether some of a block are used outside of blocks."""
        key_to_id = self._key_to_id
        used: dict[int, Stretch] = {}
        inside_ids = {id(p) for block in self._blocks for p in block.module.parameters()}
        between: set[int] = set()
        outside: set[int] = set()
        for stretch in self.stretches:
            seen = {key_to_id[key] for key in stretch.segment.parameters}
            if stretch.block is not None:
                # A repetition ran nothing: its own weights, and the kind's from outside blocks.
                own = {id(p) for p in stretch.block.module.parameters()}
                after = {key_to_id[key] for key in stretch.after}
                outside |= after
                used_inside = {key_to_id[key] for key in stretch.inside} - inside_ids
                seen = own | used_inside | after | between
                between = after
            else:
                seen, between = seen | between, set()
                outside |= seen
            stretch.parameters = seen
            for identity in seen:
                used.setdefault(identity, stretch)
        home = self.stretches[0]
        for parameter in self._traceable.model.parameters():
            # Never used: it goes where its neighbour in the model goes.
            home = used.get(id(parameter), home)
            home.parameters.add(id(parameter))
        return bool(outside & inside_ids)


def _look(tensor: torch.Tensor) -> object:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _distinct_bytes(tensors: Any) -> int:
    return sum({storage_key(tensor): tensor_bytes(tensor) for tensor in tensors}.values())


def _num_tokens(entering: list[torch.Tensor]) -> int | None:
    shapes = [t.shape for t in entering if t.is_floating_point() and t.dim() == 3]
    return int(shapes[0][1]) if shapes else None


def _without_empty_bridges(stretches: list[Stretch]) -> list[Stretch]:
    return [
        stretch
        for stretch in stretches
        if stretch.label != "bridge" or stretch.segment.num_calls or stretch.parameters
    ]
