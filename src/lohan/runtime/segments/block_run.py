"""One block, one micro-batch: its forward, and its re-run with backward.

Owns what must survive between the two (`BlockVisit`): where the inputs went, the random state,
the ambient settings, buffers the block changes. The forward builds a graph as the plain run does,
because operators choose kernels by whether they need one, and drops it as soon as it ends: a
forward needs as much memory as the re-run, and nothing survives it but what was put into the
store. Called by `segments.passes` on the main thread.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lohan.errors import ConfigError
from lohan.runtime.randomness import Generators, RandomState, same_state
from lohan.runtime.segments.ambient import Ambient
from lohan.runtime.segments.changing_buffers import ChangingBuffers
from lohan.runtime.segments.cuts import (
    Edge,
    PendingGradients,
    edge_of,
    enter,
    is_enter,
    is_exit,
    leaf_of,
    leave,
    refuse_kept,
)
from lohan.runtime.swap_modes import (
    ENTRY_ORDINAL,
    SIDE_ORDINAL,
    ActivationKey,
    ActivationStore,
    BlockChoices,
    CaptureMode,
    ForwardRecord,
    ReplayMode,
)
from lohan.vocabulary import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """A block as the model called it."""

    forward: Callable[..., Any]
    """The module's own forward."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ambient: Ambient


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tensor that entered the block."""

    key: ActivationKey
    is_owner: bool
    """Whether this block put it into the store; others only read it."""
    edge: Edge | None
    """Where its gradient goes; None if it requires none."""
    given: weakref.ref[torch.Tensor] | None
    """What this block put into the store, which may keep it as it is."""
    version: int


@dataclass(slots=True, kw_only=True)
class BlockVisit:
    """What is kept of the forward of one block and micro-batch."""

    forward: Callable[..., Any]
    ambient: Ambient
    leaves: list[Any]
    """Arguments; an `_Entry` stands for each tensor."""
    spec: TreeSpec
    exits: list[Edge | None]
    """For each output leaf where its gradient waits; None for those without one."""
    random_state: RandomState | None
    """State before the forward, if it drew random numbers."""
    record: ForwardRecord | None
    buffers: dict[str, torch.Tensor]
    """Values before the forward of the buffers that it changes."""
    entered: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Input tensors and their versions, until the next boundary; then `forget_inputs`."""

    def forget_inputs(self, what: str) -> None:
        """Check that what the store was given is still what the block saw, and let go of it."""
        for tensor, version in self.entered:
            _refuse_changed(tensor, version, what)
        self.entered.clear()


class EntryKeys:
    """Which tensors of one micro-batch are in the store already: masks enter every block."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, ActivationKey]] = {}

    def find(self, tensor: torch.Tensor) -> ActivationKey | None:
        """The key under which this very tensor, unchanged, was put before."""
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != tensor._version:
            return None
        return known[2]

    def note(self, tensor: torch.Tensor, key: ActivationKey) -> None:
        """Remember a tensor that was put."""
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, key)


class BlockRunner:
    """Runs one block, forward and again; the same object for all micro-batches and steps."""

    def __init__(
        self,
        *,
        block: BlockId,
        name: str,
        module: torch.nn.Module,
        store: ActivationStore,
        generators: Generators,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        """`parameters`: all that the block uses, its own and borrowed ones."""
        self.block, self.name, self.module = block, name, module
        self._store, self._generators = store, generators
        self._parameters = tuple(parameters)
        self._buffers = ChangingBuffers(module, name)
        self._changed_later: set[int] = set()

    def forward(
        self,
        call: BlockCall,
        *,
        micro_batch: int,
        choices: BlockChoices,
        keys: EntryKeys,
        modes: Sequence[contextlib.AbstractContextManager[Any]] = (),
    ) -> tuple[Any, BlockVisit | None]:
        """Run the block; returns what the model gets and, if it has a backward, what to keep."""
        leaves, spec = tree_flatten((call.args, call.kwargs))
        entering = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        versions = [(tensor, tensor._version) for tensor in entering.values()]
        may_have_backward = call.ambient.grad_enabled and any(
            tensor.requires_grad for tensor in (*entering.values(), *self._parameters)
        )
        noted = self._put_entries(leaves, micro_batch, keys) if may_have_backward else []
        entered = {
            key: enter(tensor.detach(), refuse_kept) if tensor.requires_grad else tensor.detach()
            for key, tensor in entering.items()
        }
        args, kwargs = tree_unflatten([entered.get(id(leaf), leaf) for leaf in leaves], spec)
        random_state = self._generators.state()
        buffers = self._buffers.before() if may_have_backward else None
        capture = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(call.ambient.applied())
            for mode in modes:
                stack.enter_context(mode)
            if may_have_backward and not choices.is_empty:
                capture = CaptureMode(
                    block=self.block,
                    micro_batch=micro_batch,
                    choices=choices,
                    store=self._store,
                    generators=self._generators,
                    changed_later=self._changed_later,
                )
                stack.enter_context(capture)
            raw = call.forward(*args, **kwargs)
        self._refuse_changed_containers((args, kwargs), leaves, entered, spec)
        originals = {id(entered[key]): tensor for key, tensor in entering.items()}
        outputs, exits = _leave(raw, originals, capture)
        if buffers is None:
            return outputs, None
        visit = BlockVisit(
            forward=call.forward,
            ambient=call.ambient,
            leaves=noted,
            spec=spec,
            exits=exits,
            random_state=None,
            record=capture.finish() if capture is not None else None,
            buffers=self._buffers.changed(buffers),
            entered=versions,
        )
        if not same_state(random_state, self._generators.state()):
            visit.random_state = random_state
        return outputs, visit

    def backward(
        self,
        visit: BlockVisit,
        *,
        pending: PendingGradients,
        choices: BlockChoices,
        should_check: bool,
        on_recomputed: Callable[[], None],
    ) -> None:
        """Run the block again with its graph and send gradients into its inputs and parameters.

        Parameters collect theirs in `.grad`, from where the caller's hooks take them.
        """
        arrived = [pending.take(edge) if edge is not None else None for edge in visit.exits]
        if any(gradient is not None for gradient in arrived):
            self._run_again(visit, pending, arrived, choices, should_check, on_recomputed)
        self.drop(visit)

    def drop(self, visit: BlockVisit) -> None:
        """Let go of what the store holds for a visit."""
        for leaf in {leaf.key: leaf for leaf in visit.leaves if isinstance(leaf, _Entry)}.values():
            if leaf.is_owner:
                self._store.drop(leaf.key)
        for key in visit.record.keys if visit.record is not None else ():
            self._store.drop(key)

    def _run_again(
        self,
        visit: BlockVisit,
        pending: PendingGradients,
        arrived: list[torch.Tensor | None],
        choices: BlockChoices,
        should_check: bool,
        on_recomputed: Callable[[], None],
    ) -> None:
        delivered: dict[Edge, torch.Tensor] = {}
        entered: dict[ActivationKey, torch.Tensor] = {}
        roots: list[tuple[torch.Tensor, torch.Tensor]] = []
        for leaf in visit.leaves:
            if isinstance(leaf, _Entry) and leaf.key not in entered:
                kept = self._store.get(leaf.key)
                if leaf.given is not None and leaf.given() is kept:
                    _refuse_changed(kept, leaf.version, f"block {self.name}")
                value = kept.detach()
                del kept
                if leaf.edge is not None:
                    value = enter(value, _deliver_to(delivered, leaf.edge))
                    so_far = pending.take(leaf.edge)
                    if so_far is not None:
                        roots.append((value, so_far))
                entered[leaf.key] = value
        args, kwargs = tree_unflatten(
            [entered[leaf.key] if isinstance(leaf, _Entry) else leaf for leaf in visit.leaves],
            visit.spec,
        )
        with self._buffers.as_before(visit.buffers):
            raw = self._compute_again(visit, choices, args, kwargs)
            for output, gradient in zip(tree_flatten(raw)[0], arrived, strict=True):
                if gradient is not None:
                    roots.append((output, gradient))
            roots.extend(pending.take_parameters(self._parameters))
            tensors = [tensor for tensor, _ in roots]
            if should_check:
                self._refuse_foreign_tensors(tensors)
            gradients = [gradient for _, gradient in roots]
            # From here on only the graph holds the outputs, and only the engine the gradients.
            del raw, args, kwargs, roots, arrived
            on_recomputed()
            torch.autograd.backward(tensors, gradients)
        for edge, gradient in delivered.items():
            pending.put(edge, gradient)

    def _compute_again(
        self, visit: BlockVisit, choices: BlockChoices, args: Any, kwargs: Any
    ) -> Any:
        after = self._generators.state()
        try:
            if visit.random_state is not None:
                self._generators.set_state(visit.random_state)
            with visit.ambient.applied():
                if visit.record is None:
                    return visit.forward(*args, **kwargs)
                replay = ReplayMode(
                    block=self.block,
                    choices=choices,
                    store=self._store,
                    generators=self._generators,
                    forward=visit.record,
                )
                with replay:
                    raw = visit.forward(*args, **kwargs)
                replay.finish()
                return raw
        finally:
            self._generators.set_state(after)

    def _put_entries(self, leaves: list[Any], micro_batch: int, keys: EntryKeys) -> list[Any]:
        noted: list[Any] = []
        here: dict[int, _Entry] = {}
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                noted.append(leaf)
                continue
            if id(leaf) not in here:
                key, given = keys.find(leaf), None
                is_owner = key is None
                if key is None:
                    # What has no gradient (masks, positions) enters every block and stays.
                    ordinal = ENTRY_ORDINAL if leaf.requires_grad else SIDE_ORDINAL
                    key = ActivationKey(micro_batch, self.block, ordinal, len(here))
                    value = leaf.detach()
                    given = weakref.ref(value)
                    self._store.put(key, value)
                    keys.note(leaf, key)
                elif key.block != self.block:
                    self._store.share(key, leaf.detach())
                edge = edge_of(leaf) if leaf.requires_grad else None
                here[id(leaf)] = _Entry(
                    key=key, is_owner=is_owner, edge=edge, given=given, version=leaf._version
                )
            noted.append(here[id(leaf)])
        return noted

    def _refuse_changed_containers(
        self, given: Any, leaves: list[Any], entered: Mapping[int, Any], spec: TreeSpec
    ) -> None:
        """Blocks are given copies of lists and mappings: what they put there would be lost."""
        after, spec_after = tree_flatten(given)
        if spec_after == spec and all(
            now is entered.get(id(leaf), leaf) for now, leaf in zip(after, leaves, strict=True)
        ):
            return
        raise ConfigError(
            f"block {self.name} changed a list or mapping among its arguments",
            why="the block is run again from its arguments in backward, and would change it twice",
            remedy="return what the block makes, and put it there outside the block",
        )

    def _refuse_foreign_tensors(self, roots: Sequence[torch.Tensor]) -> None:
        """Only arguments and own parameters may feed the block's graph."""
        own = set(self._parameters)
        to_visit = [edge_of(root)[0] for root in roots]
        visited = set(to_visit)
        while to_visit:
            node = to_visit.pop()
            leaf = leaf_of(node)
            if is_exit(node) or (leaf is not None and leaf not in own):
                shape = f" of shape {tuple(leaf.shape)}" if leaf is not None else ""
                raise ConfigError(
                    f"block {self.name} uses a tensor{shape} with a gradient that is neither an "
                    "argument nor a parameter of its own",
                    why="its gradient would be lost or counted at the wrong time",
                    remedy="pass the tensor to the block as an argument",
                )
            if not is_enter(node):
                for following, _ in node.next_functions:
                    if following is not None and following not in visited:
                        visited.add(following)
                        to_visit.append(following)


def _refuse_changed(tensor: torch.Tensor, version: int, what: str) -> None:
    if tensor._version != version:
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} that entered {what} was changed in place",
            why="the block is run again from its inputs in backward",
            remedy="write `x = x + y` instead of `x += y` for inputs of blocks",
        )


def _leave(
    raw: Any, originals: Mapping[int, torch.Tensor], capture: CaptureMode | None
) -> tuple[Any, list[Edge | None]]:
    """Outputs for the model, cut off from the block's graph, and the edges of their gradients."""
    leaves, spec = tree_flatten(raw)
    left: dict[int, torch.Tensor] = {}
    edges: dict[int, Edge | None] = {}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in left:
            continue
        if id(leaf) in originals:
            # Handed through: plain autograd would know it under one name, so it keeps that.
            left[id(leaf)], edges[id(leaf)] = originals[id(leaf)], None
            continue
        value = leaf.detach()
        if capture is not None and capture.shares_memory_with_stored(value):
            value = value.clone()  # the model may change its copy in place, not the store's
        left[id(leaf)] = leave(value) if leaf.requires_grad else value
        edges[id(leaf)] = edge_of(left[id(leaf)]) if leaf.requires_grad else None
    # An output that is there twice has one sum of gradients, taken once.
    exits: list[Edge | None] = []
    for leaf in leaves:
        edge = edges.get(id(leaf))
        exits.append(edge if edge not in exits else None)
    return tree_unflatten([left.get(id(leaf), leaf) for leaf in leaves], spec), exits


def _deliver_to(delivered: dict[Edge, torch.Tensor], edge: Edge) -> Callable[[torch.Tensor], None]:
    def deliver(gradient: torch.Tensor) -> None:
        delivered[edge] = gradient

    return deliver
