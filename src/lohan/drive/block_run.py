"""One block, one micro-batch: its forward, and its backward, for which it is mostly run again.

Owns what must survive between the two (`BlockVisit`): where the inputs went, the random state,
the ambient settings, buffers the block changes. The forward builds a graph as the plain run does,
because operators choose kernels by whether they need one. If all of it is to stay, it is kept
(`kept_graph`); else it is dropped as soon as the forward ends, which needs as much memory as the
re-run, and nothing survives but what was put into the store. Called by `passes` on the
main thread.
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lohan.drive.activations.swap_modes import (
    ActivationKey,
    ActivationStore,
    BlockChoices,
    CaptureMode,
    ForwardRecord,
    ReplayMode,
)
from lohan.drive.edges.cuts import (
    Edge,
    PendingGradients,
    edge_of,
    enter,
    refuse_foreign_leaves,
)
from lohan.drive.edges.entries import (
    Arrivals,
    Entry,
    EntryKeys,
    refuse_changed,
    refuse_changed_objects,
)
from lohan.drive.edges.exits import leave_block, refuse_changed_alias
from lohan.drive.kept_graph import GraphWatch, KeptGraph, refuses_hooks
from lohan.drive.surroundings.ambient import Ambient
from lohan.drive.surroundings.randomness import Generators, RandomState, same_state
from lohan.drive.watch.changing_buffers import ChangingBuffers
from lohan.drive.watch.contents import Contents
from lohan.drive.watch.held_values import HeldValues
from lohan.drive.weights.parameter_views import Weights
from lohan.vocabulary import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """A block as the model called it."""

    forward: Callable[..., Any]
    """The module's own forward."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ambient: Ambient


@dataclass(slots=True, kw_only=True)
class BlockVisit:
    """What is kept of the forward of one block and micro-batch."""

    forward: Callable[..., Any]
    ambient: Ambient
    leaves: list[Any]
    """Arguments; an `Entry` stands for each tensor."""
    spec: TreeSpec
    exits: list[Edge | None]
    """For each output leaf where its gradient waits; None for those without one."""
    random_state: RandomState | None
    """State before the forward, if it drew random numbers."""
    record: ForwardRecord | None
    buffers: dict[str, torch.Tensor]
    """Values before the forward of the buffers that it changes."""
    objects: Contents
    """Arguments that are neither tensors nor plain values."""
    graph: KeptGraph | None = None
    """Where there is one, the block is not run again."""
    held: list[tuple[Any, Any]] = field(default_factory=list)
    """Values in attributes that the forward changed inside, with what was in them before."""
    entered: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Input tensors and their versions, until the next boundary; then `forget_inputs`."""

    sharing: list[torch.Tensor] = field(default_factory=list)
    """Outputs with gradients whose memory is that of others; until then, too."""

    def forget_inputs(self, what: str) -> None:
        """Check that what the store was given is still what the block saw, and let go of it."""
        for tensor, version in self.entered:
            refuse_changed(tensor, version, what)
        for tensor in self.sharing:
            refuse_changed_alias(tensor, what)
        self.entered.clear()
        self.sharing.clear()

    def refuse_other_objects(self, what: str) -> None:
        """Check that a re-run will find the objects that the forward was given, as they were."""
        if self.graph is None:
            refuse_changed_objects(self.objects, what)


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
        weights: Weights,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        """`weights`: of the model; `parameters`: all that the block uses, own and borrowed."""
        self.block, self.name, self.module = block, name, module
        self._store, self._generators = store, generators
        self._weights, self._parameters = weights, tuple(parameters)
        self._buffers = ChangingBuffers(module, name)
        self._held = HeldValues(module, name)
        self._changed_later: set[int] = set()
        self._without_graph: set[Hashable] = set()
        """Inputs, by their shapes, for which the graph was found not to be one to keep."""
        self._holds_weights = False
        """Whether that was because of weights."""

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
        arrivals = Arrivals(call.args, call.kwargs)
        versions = arrivals.versions()
        may_have_backward = call.ambient.grad_enabled and any(
            tensor.requires_grad for tensor in (*arrivals.tensors.values(), *self._parameters)
        )
        if may_have_backward:
            arrivals.put(self.block, micro_batch, self._store, keys)
        args, kwargs = arrivals.enter()
        random_state = self._generators.state()
        buffers = self._buffers.before() if may_have_backward else None
        held = self._held.before() if may_have_backward else []
        watch, capture = None, None
        if may_have_backward:
            # Draws are recorded in steps of their own, which may as well run blocks again.
            watch = self._watch(arrivals, choices) if not modes else None
            capture = self._capture(micro_batch, choices) if watch is None else None
        try:
            raw = _run(call, args, kwargs, [*modes, watch.hooks() if watch else capture])
        except RuntimeError as error:
            if watch is None or buffers is None or not refuses_hooks(error):
                raise
            self._without_graph.add(arrivals.shapes)
            self._generators.set_state(random_state)
            self._buffers.put_back(buffers)
            watch, capture = None, self._capture(micro_batch, choices)
            raw = _run(call, args, kwargs, [capture])
        arrivals.refuse_changed_containers(f"block {self.name}")
        arrivals.refuse_hooks(f"block {self.name}")
        outputs, exits, sharing = leave_block(raw, arrivals.originals(), capture, self._weights)
        if buffers is None:
            return outputs, None
        visit = BlockVisit(
            forward=call.forward,
            ambient=call.ambient,
            leaves=arrivals.noted,
            spec=arrivals.spec,
            exits=exits,
            random_state=None,
            record=capture.finish() if capture is not None else None,
            buffers=self._buffers.changed(buffers),
            objects=arrivals.objects,
            entered=versions,
            sharing=sharing,
        )
        if not same_state(random_state, self._generators.state()):
            visit.random_state = random_state
        # What the next micro-batch changes in the block must not reach this one's backward.
        if watch is not None and not visit.buffers and watch.may_keep():
            visit.graph = KeptGraph(
                outputs=tuple(
                    get_gradient_edge(leaf) if edge is not None else None
                    for leaf, edge in zip(tree_flatten(raw)[0], exits, strict=True)
                ),
                starts=arrivals.starts(),
                deliveries=arrivals.deliveries,
            )
        elif watch is not None:
            self._without_graph.add(arrivals.shapes)
            # With other inputs it may let go of one weight and take another, which does not show.
            self._holds_weights = self._holds_weights or watch.has_more_users()
        visit.held = self._held.changed(held, is_run_again=visit.graph is None)
        return outputs, visit

    def _watch(self, arrivals: Arrivals, choices: BlockChoices) -> GraphWatch | None:
        if choices.graph_bytes is None or self._holds_weights:
            return None
        if arrivals.shapes in self._without_graph:
            return None
        return GraphWatch(
            f"block {self.name}",
            weights=self._weights,
            parameters=self._parameters,
            outside=[*arrivals.tensors.values(), *self.module.buffers()],
            graph_bytes=choices.graph_bytes,
        )

    def _capture(self, micro_batch: int, choices: BlockChoices) -> CaptureMode | None:
        if choices.is_empty:
            return None
        return CaptureMode(
            block=self.block,
            micro_batch=micro_batch,
            choices=choices,
            store=self._store,
            generators=self._generators,
            changed_later=self._changed_later,
        )

    def backward(
        self,
        visit: BlockVisit,
        *,
        pending: PendingGradients,
        choices: BlockChoices,
        should_check: bool,
        on_recomputed: Callable[[], None],
    ) -> None:
        """Send gradients into the block's inputs and parameters, running it again for its graph
        where that was not kept.

        Parameters collect theirs in `.grad`, from where the caller's hooks take them.
        """
        arrived = [pending.take(edge) if edge is not None else None for edge in visit.exits]
        if any(gradient is not None for gradient in arrived):
            if visit.graph is not None:
                visit.graph.backward(
                    arrived,
                    pending=pending,
                    parameters=self._parameters,
                    check=self._refuse_foreign if should_check else None,
                    on_recomputed=on_recomputed,
                )
            else:
                self._run_again(visit, pending, arrived, choices, should_check, on_recomputed)
        self.drop(visit)

    def drop(self, visit: BlockVisit) -> None:
        """Let go of the graph and of what the store holds for a visit."""
        visit.graph = None
        for leaf in {leaf.key: leaf for leaf in visit.leaves if isinstance(leaf, Entry)}.values():
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
            if isinstance(leaf, Entry) and leaf.key not in entered:
                kept = self._store.get(leaf.key)
                if leaf.given is not None and leaf.given() is kept:
                    refuse_changed(kept, leaf.version, f"block {self.name}")
                value = kept.detach()
                del kept
                if leaf.edge is not None:
                    value = enter(value, partial(delivered.__setitem__, leaf.edge))
                    so_far = pending.take(leaf.edge)
                    if so_far is not None:
                        roots.append((value, so_far))
                entered[leaf.key] = value
        args, kwargs = tree_unflatten(
            [entered[leaf.key] if isinstance(leaf, Entry) else leaf for leaf in visit.leaves],
            visit.spec,
        )
        with self._buffers.as_before(visit.buffers), self._held.as_before(visit.held):
            raw = self._compute_again(visit, choices, args, kwargs)
            for output, gradient in zip(tree_flatten(raw)[0], arrived, strict=True):
                if gradient is not None:
                    roots.append((output, gradient))
            roots.extend(pending.take_parameters(self._parameters))
            tensors = [tensor for tensor, _ in roots]
            if should_check:
                self._refuse_foreign([edge_of(tensor)[0] for tensor in tensors])
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

    def _refuse_foreign(self, roots: Sequence[Node]) -> None:
        refuse_foreign_leaves(roots, set(self._parameters), f"block {self.name}")


def _run(
    call: BlockCall,
    args: Any,
    kwargs: Any,
    modes: Sequence[contextlib.AbstractContextManager[Any] | None],
) -> Any:
    with contextlib.ExitStack() as stack:
        stack.enter_context(call.ambient.applied())
        for mode in modes:
            if mode is not None:
                stack.enter_context(mode)
        return call.forward(*args, **kwargs)
