"""One block, one micro-batch: its forward, and its backward.

What must survive between the two is a `BlockVisit`: where the inputs went, the random state, the
ambient settings, buffers the block changes. A block is run as a captured graph once that was found
to give the bits of an eager run; before, and where it cannot be captured, its own code is run: the
graph of its forward is dropped as soon as that ends, and made again for its backward. Called by
`passes` on the main thread.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from lohan.drive.activations.store import ActivationKey, ActivationStore, BlockChoices
from lohan.drive.block_visit import BlockCall, BlockVisit, Entered
from lohan.drive.captured.graphs import (
    MOST_WAYS,
    NEVER_AGAIN,
    Captures,
    Trust,
    call_key,
    output_tensors,
)
from lohan.drive.captured.record import Arguments, Arrived, NotCapturable
from lohan.drive.captured.trial import Trial
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
)
from lohan.drive.edges.exits import leave_block
from lohan.drive.surroundings.randomness import Generators, same_state
from lohan.drive.watch.contract import Changes, Contract
from lohan.drive.watch.own_attributes import OwnAttributes
from lohan.drive.weights.parameter_views import Weights
from lohan.errors import DoesNotFit
from lohan.vocabulary import BlockId

TakeGradient = Callable[[torch.nn.Parameter, torch.Tensor], None]


class BlockRunner:
    """Runs one block, forward and backward; the same object for all micro-batches and steps."""

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
        captures: Captures,
        outside: Mapping[str, torch.nn.Module],
    ) -> None:
        """`weights`: of the model; `parameters`: all that the block uses, own and borrowed;
        `captures`: of all its blocks; `outside`: its modules in no block, and its blocks."""
        self.block, self.name, self.module = block, name, module
        self._store, self._generators = store, generators
        self._weights, self._parameters = weights, tuple(parameters)
        self._contract = Contract(module, name, outside)
        self._captures = captures
        self._trust = captures.trust(name)
        self._last: tuple[Hashable, Trust] | None = None
        self._in_place: list[torch.Tensor] = []
        """What graphs are given besides arguments: weights and buffers."""
        self._given_buffers: list[torch.Tensor] = []
        names = {id(parameter): path for path, parameter in module.named_parameters()}
        self._parameter_names = tuple(names.get(id(p), id(p)) for p in self._parameters)

    def begin_step(self) -> None:
        """The block may have other buffers than in the last one."""
        self._given_buffers = list(self.module.buffers())

    def forward(
        self,
        call: BlockCall,
        *,
        micro_batch: int,
        choices: BlockChoices,
        keys: EntryKeys,
        attributes: OwnAttributes,
        modes: Sequence[contextlib.AbstractContextManager[Any]] = (),
    ) -> tuple[Any, BlockVisit | None]:
        """Run the block; returns what the model gets and, if it has a backward, what to keep."""
        arrivals = Arrivals(call.leaves, call.spec)
        versions = arrivals.versions()
        may_have_backward = call.ambient.grad_enabled and any(
            tensor.requires_grad for tensor in (*arrivals.tensors.values(), *self._parameters)
        )
        if may_have_backward:
            arrivals.put(self.block, micro_batch, self._store, keys)
        key = self._key(call, arrivals) if may_have_backward and not modes else None
        trust = self._known(key) if key is not None else None
        if trust is not None and trust.graph is not None:
            return self._run_graph(trust, call, arrivals, versions, key, micro_batch, choices)
        args, kwargs = arrivals.enter()
        random_state = self._generators.state()
        attributes.put()
        with contextlib.ExitStack() as stack:
            changes = stack.enter_context(
                self._contract.watched((args, kwargs), is_run_again=may_have_backward)
            )
            stack.enter_context(call.ambient.applied())
            for mode in modes:
                stack.enter_context(mode)
            raw = call.forward(*args, **kwargs)
        self._hide_weights(changes)
        attributes.note(changes.attributes)
        arrivals.refuse_hooks(f"block {self.name}")
        leaves, spec = tree_flatten(raw)
        with_gradient = [isinstance(one, torch.Tensor) and one.requires_grad for one in leaves]
        left, exits, sharing = leave_block(
            leaves, with_gradient, arrivals.originals(), self._weights
        )
        outputs = tree_unflatten(left, spec)
        if not may_have_backward:
            return outputs, None
        is_drawn = not same_state(random_state, self._generators.state())
        visit = BlockVisit(
            forward=call.forward,
            ambient=call.ambient,
            leaves=arrivals.noted,
            spec=arrivals.spec,
            exits=exits,
            random_state=random_state if is_drawn else None,
            changes=changes,
            objects=arrivals.objects,
            entered=versions,
            sharing=sharing,
            key=key,
        )
        return outputs, visit

    def _hide_weights(self, changes: Changes) -> None:
        """A weight that the block has left in an attribute is about to be somebody else's memory:
        whoever reads it is told so."""
        for target, name, _ in changes.attributes:
            value = target.get(name)
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                target[name] = self._weights.stand_in(value)

    def _key(self, call: BlockCall, arrivals: Arrivals) -> Hashable | None:
        why_not = call.why_not
        if any(parameter._backward_hooks for parameter in self._parameters):
            why_not = "a hook is on the gradient of one of its parameters"
        key = call_key(arrivals.leaves, arrivals.spec, call.ambient)
        if key is None:
            why_not = "its arguments are more than tensors and plain values"
        if why_not is None:
            self._captures.refused.pop(self.name, None)
            return call.settings, self._parameter_names, key
        self._captures.refused[self.name] = why_not
        return None

    def _known(self, key: Hashable) -> Trust | None:
        """What is known of the block called so. The last one met is the last one to go."""
        if self._last is None or self._last[0] != key:
            trust = self._trust.pop(key, None)
            if trust is None:
                return None
            self._trust[key] = trust
            self._last = (key, trust)
        return self._last[1]

    def _run_graph(
        self,
        trust: Trust,
        call: BlockCall,
        arrivals: Arrivals,
        versions: list[tuple[torch.Tensor, int]],
        key: Hashable,
        micro_batch: int,
        choices: BlockChoices,
    ) -> tuple[Any, BlockVisit]:
        graph = trust.graph
        assert graph is not None
        visit = BlockVisit(
            forward=call.forward,
            ambient=call.ambient,
            leaves=arrivals.noted,
            spec=arrivals.spec,
            exits=[],
            random_state=self._generators.state() if graph.draws else None,
            entered=versions,
            key=key,
            trust=trust,
            graph=graph,
            stored=choices.stored,
        )
        if choices.stored and trust.fitting is not choices:
            if graph.fits(choices.names):
                trust.fitting = choices
            else:
                visit.stored = frozenset()
                self._captures.unplanned.add(self.name)
        cut, forward = graph.forward(visit.stored)

        def put(place: int, tensor: torch.Tensor) -> None:
            ordinal = cut.stored[place].ordinal
            if ordinal in choices.kept:
                visit.kept[place] = tensor
            else:
                key = ActivationKey(micro_batch, self.block, ordinal, place)
                self._store.put(key, tensor)
                visit.keys[place] = key

        def note(place: int) -> None:
            visit.states[place] = self._generators.state()

        tensors = [tensor.detach() for tensor in arrivals.tensors.values()]
        originals = {
            id(mine): own for mine, own in zip(tensors, arrivals.tensors.values(), strict=True)
        }
        with torch._C._AutoDispatchBelowAutograd():
            made = forward([*self._in_place, *tensors], put, note)
        left, visit.exits, visit.sharing = leave_block(
            output_tensors(graph, made),
            graph.with_gradient,
            originals,
            self._weights if graph.returns_given else None,
            graph.stored_outputs(visit.stored),
        )
        is_one = len(left) == 1 and graph.spec.is_leaf()
        return left[0] if is_one else tree_unflatten(left, graph.spec), visit

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Its weights are there: the same for all micro-batches."""
        self._in_place = [*(one.detach() for one in self._parameters), *self._given_buffers]
        try:
            yield
        finally:
            self._in_place = []

    def backward(
        self,
        visit: BlockVisit,
        *,
        pending: PendingGradients,
        take_gradient: TakeGradient,
        should_check: bool,
        on_recomputed: Callable[[], None],
    ) -> None:
        """Send gradients into the block's inputs, and those of parameters to `take_gradient`."""
        arrived = [pending.take(edge) if edge is not None else None for edge in visit.exits]
        if any(gradient is not None for gradient in arrived):
            entries = self._entries(visit, pending)
            starts = Arrived(
                of_tensors=[one.so_far for one in entries.values()],
                of_outputs=arrived,
                of_parameters=pending.take_all(self._parameters),
            )
            del arrived
            is_done = visit.graph is not None and self._graph_backward(
                visit, entries, starts, pending, take_gradient, on_recomputed
            )
            if not is_done:
                self._run_again(
                    visit, entries, starts, pending, take_gradient, should_check, on_recomputed
                )
        self.drop(visit)

    def drop(self, visit: BlockVisit) -> None:
        """Let go of what the store holds for a visit."""
        for leaf in {leaf.key: leaf for leaf in visit.leaves if isinstance(leaf, Entry)}.values():
            if leaf.is_owner:
                self._store.drop(leaf.key)
        for key in visit.keys.values():
            self._store.drop(key)
        visit.kept.clear()

    def _entries(
        self, visit: BlockVisit, pending: PendingGradients
    ) -> dict[ActivationKey, "Entered"]:
        found: dict[ActivationKey, Entered] = {}
        for leaf in visit.leaves:
            if isinstance(leaf, Entry) and leaf.key not in found:
                kept = self._store.get(leaf.key)
                if leaf.given is not None and leaf.given() is kept:
                    refuse_changed(kept, leaf.version, f"block {self.name}")
                so_far = pending.take(leaf.edge) if leaf.edge is not None else None
                found[leaf.key] = Entered(kept.detach(), leaf.edge, so_far)
        return found

    def _graph_backward(
        self,
        visit: BlockVisit,
        entries: dict[ActivationKey, "Entered"],
        starts: Arrived,
        pending: PendingGradients,
        take_gradient: TakeGradient,
        on_recomputed: Callable[[], None],
    ) -> bool:
        """Whether there is a graph for the gradients that arrived."""
        graph = visit.graph
        assert graph is not None
        trust = visit.trust
        if trust is None or trust.graph is not graph or starts.pattern not in trust.patterns:
            return False
        backward = graph.backward(starts.pattern, visit.stored)
        if backward is None:
            return False
        edges = [one.edge for one in entries.values() if one.edge is not None]
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        delivered: list[tuple[Edge, torch.Tensor]] = []

        def deliver(place: int, gradient: torch.Tensor) -> None:
            if place < len(edges):
                delivered.append((edges[place], gradient))
            else:
                take_gradient(trained[place - len(edges)], gradient)

        def get(place: int) -> torch.Tensor:
            kept = visit.kept.pop(place, None)
            return kept if kept is not None else self._store.get(visit.keys[place])

        given = [*self._in_place, *(one.value for one in entries.values()), *starts.present()]
        after = self._generators.state() if visit.states else None
        entries.clear()
        starts.forget()
        with torch._C._AutoDispatchBelowAutograd():
            backward(
                given,
                get,
                lambda place: self._generators.set_state(visit.states[place]),
                on_recomputed,
                deliver,
            )
        if after is not None:
            self._generators.set_state(after)
        for edge, gradient in delivered:
            pending.put(edge, gradient)
        return True

    def _run_again(
        self,
        visit: BlockVisit,
        entries: dict[ActivationKey, "Entered"],
        starts: Arrived,
        pending: PendingGradients,
        take_gradient: TakeGradient,
        should_check: bool,
        on_recomputed: Callable[[], None],
    ) -> None:
        """Run the block's own code again for its graph, and send gradients through that."""
        trial = self._try_graph(visit, entries, starts)
        delivered: dict[Edge, torch.Tensor] = {}
        entered: dict[ActivationKey, torch.Tensor] = {}
        for key, one in entries.items():
            if one.edge is not None:
                entered[key] = enter(one.value, partial(delivered.__setitem__, one.edge))
            else:
                entered[key] = one.value
        args, kwargs = tree_unflatten(
            [entered[leaf.key] if isinstance(leaf, Entry) else leaf for leaf in visit.leaves],
            visit.spec,
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._contract.as_before(visit.changes))
            raw = self._compute_again(visit, args, kwargs)
            leaves = tree_flatten(raw)[0]
            if trial is not None:
                trial.note_outputs(leaves)
                stack.enter_context(trial.noting())
            ends = [*entered.values(), *leaves, *self._parameters]
            everything = (*starts.of_tensors, *starts.of_outputs, *starts.of_parameters)
            roots = [
                (end, gradient)
                for end, gradient in zip(ends, everything, strict=True)
                if gradient is not None
            ]
            tensors = [tensor for tensor, _ in roots]
            if should_check:
                nodes = [edge_of(tensor)[0] for tensor in tensors]
                refuse_foreign_leaves(nodes, set(self._parameters), f"block {self.name}")
            gradients = [gradient for _, gradient in roots]
            # From here on only the graph holds the outputs, and only the engine the gradients.
            del raw, leaves, ends, everything, args, kwargs, roots, entered
            entries.clear()
            starts.forget()
            on_recomputed()
            stack.enter_context(self._gradients_taken(take_gradient))
            torch.autograd.backward(tensors, gradients)
        if trial is not None:
            self._judge(visit, trial, delivered)
        for edge, gradient in delivered.items():
            pending.put(edge, gradient)

    @contextlib.contextmanager
    def _gradients_taken(self, take_gradient: TakeGradient) -> Iterator[None]:
        """Gradients of parameters are taken as they come, before they take up room twice."""

        def take(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            assert isinstance(parameter, torch.nn.Parameter)
            take_gradient(parameter, gradient)

        handles = [
            parameter.register_post_accumulate_grad_hook(take)
            for parameter in self._parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _compute_again(self, visit: BlockVisit, args: Any, kwargs: Any) -> Any:
        after = self._generators.state()
        try:
            if visit.random_state is not None:
                self._generators.set_state(visit.random_state)
            with visit.ambient.applied():
                return visit.forward(*args, **kwargs)
        finally:
            self._generators.set_state(after)

    # Whether a graph may stand for the block

    def _try_graph(
        self, visit: BlockVisit, entries: dict[ActivationKey, "Entered"], starts: Arrived
    ) -> Trial | None:
        """Capture the block and run the graph on what an eager run is about to get; None if there
        is nothing to try."""
        if visit.key is None:
            return None
        trust = self._trust.setdefault(visit.key, Trust())
        if len(self._trust) > MOST_WAYS:
            del self._trust[next(iter(self._trust))]
        trust.num_visits += 1
        # Batches of all lengths: most shapes are met once, and are not worth a capture.
        is_rare = len(self._trust) > 1 and trust.num_visits == 1
        if is_rare or (not trust.is_open and visit.graph is None):
            return None
        trust.num_tries += 1
        if (effect := visit.changes.effect) is not None:
            trust.reason = effect
            return None
        proven = self._captures.proven(visit.key, starts.pattern)
        ways = self._trust.values()
        if (
            proven is not None
            and any(starts.pattern in one.patterns for one in ways)
            and all(one.reason is None for one in ways)
        ):
            # Compared with this block's own code at other shapes, and at these with that of a block
            # made alike: a comparison of every block at every shape takes as long as a step.
            trust.graph, trust.reason = proven, None
            trust.patterns.add(starts.pattern)
            return None
        values = {key: one.value for key, one in entries.items()}
        given = Arguments(
            leaves=[values[leaf.key] if isinstance(leaf, Entry) else leaf for leaf in visit.leaves],
            spec=visit.spec,
            tensors=list(values.values()),
            requires_grad=[one.edge is not None for one in entries.values()],
            parameters=self._parameters,
            buffers=self._given_buffers,
        )

        def forward(*args: Any, **kwargs: Any) -> Any:
            with visit.ambient.applied():
                return visit.forward(*args, **kwargs)

        try:
            graph = self._captures.graph(visit.key, forward, self.module, given, starts)
        except NotCapturable as error:
            trust.reason, trust.num_tries, trust.graph = str(error), NEVER_AGAIN, None
            return None
        trial = Trial(graph, [one.edge for one in entries.values() if one.edge is not None])
        after = self._generators.state()
        try:
            values_given = [*self._in_place, *given.tensors]
            trial.run(values_given, starts, self._parameters, self._generators, visit.random_state)
        except (RuntimeError, DoesNotFit) as error:
            # Kernels may lay results out in another way than fake ones, where a view is refused.
            first = str(error).partition("\n")[0]
            trust.reason, trust.num_tries = f"its graph does not run ({first})", NEVER_AGAIN
            return None
        finally:
            self._generators.set_state(after)
        return trial

    def _judge(self, visit: BlockVisit, trial: Trial, delivered: dict[Edge, torch.Tensor]) -> None:
        trust = self._trust[visit.key]
        difference = trial.difference(delivered)
        if difference is None:
            trust.graph, trust.reason = trial.graph, None
            trust.patterns.add(trial.pattern)
            trial.graph.proven.add(trial.pattern)
            if trial.unsteady:
                self._captures.unsteady.add(self.name)
        else:
            trust.graph, trust.num_tries = None, NEVER_AGAIN
            trust.reason = f"its graph gave another {difference} than its code"
