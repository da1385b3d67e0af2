"""The forward and backward pass of one step over all its micro-batches.

Owns the order: all micro-batches through block k before block k+1, the last segment forward and
backward at the turn, then blocks in reverse. Made by `segmented_model` for one step and thrown away
after it; runs on the main thread.
"""

import contextlib
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch.autograd.graph import Node

from lohan.drive.activations.store import BlockChoices
from lohan.drive.block_run import BlockRunner
from lohan.drive.edges.cuts import edge_of, is_exit, leaf_of
from lohan.drive.gradient_sums import GradientSums
from lohan.drive.hooks import SegmentHooks, StepGroups
from lohan.drive.micro_batch import MicroBatch, where
from lohan.drive.outside_run import add_to_leaf, rest_backward
from lohan.drive.segment_map import Phase, Segment, SegmentKind, SegmentMap
from lohan.drive.surroundings.randomness import (
    DrawLedger,
    DrawsUnknown,
    Generators,
    RandomState,
    same_state,
)
from lohan.drive.watch.shared_state import SharedState
from lohan.drive.watch.unchanged_weights import weights_unchanged
from lohan.drive.weights.parameter_views import ParameterSet
from lohan.errors import ConfigError, ScheduleError, bug
from lohan.vocabulary import BlockId

_NOTHING_CHOSEN = BlockChoices()


class Passes:
    """One step in progress."""

    def __init__(
        self,
        *,
        segments: SegmentMap,
        sets: Mapping[BlockId, ParameterSet],
        runners: Mapping[BlockId, BlockRunner],
        hooks: SegmentHooks,
        choices: Mapping[BlockId, BlockChoices],
        micro_batches: Sequence[MicroBatch],
        sums: GradientSums | None,
        with_backward: frozenset[BlockId],
        groups: StepGroups,
        should_look_closely: bool = False,
        shared: SharedState | None = None,
    ) -> None:
        """`should_look_closely`: read all weights to see that the forward leaves them alone;
        `shared`: to be told what runs, where one micro-batch does so that its draws be learned."""
        self._groups = groups
        self._segments, self._sets, self._runners = segments, sets, runners
        self._hooks, self._choices, self._sums = hooks, choices, sums
        self._micro_batches = list(micro_batches)
        self.losses: list[torch.Tensor] = []
        # Whose gradients arrive, while a block runs backward.
        self._current: tuple[Segment, MicroBatch] | None = None
        # What the generators were last set to or found at, while micro-batches go forward.
        self._random_state: RandomState | None = None
        self._with_backward = with_backward
        self._should_look_closely, self._shared = should_look_closely, shared
        self._stretch = _stretches(segments)

    # Forward

    def forward(
        self, *, generators: Generators, ledger: DrawLedger, signatures: Sequence[Hashable]
    ) -> None:
        """Run all micro-batches to their losses; with gradients, back through the last segment."""
        self._generators, self._ledger, self._signatures = generators, ledger, signatures
        self._predict_random_states()
        everyone = self._micro_batches
        for segment in self._segments:
            self._visit_forward(segment)
        # Where the first group is: a rank without it is told by the one that has it.
        first = [one for one in everyone if self._group_of(one) == self._group_of(everyone[0])]
        generators.set_state(first[-1].random_state)

    def _visit_forward(self, segment: Segment) -> None:
        is_turn = segment is self._segments.last and self._sums is not None
        phase = Phase.TURN if is_turn else Phase.FORWARD
        self._hooks.before(segment.id, phase)
        self._check_in_place(segment)
        if self._shared is not None:
            self._shared.begin_part(segment.id)
        with self._unhooked(segment), self._unchanged(segment), self._in_place(segment):
            for micro_batch in self._micro_batches:
                if segment.kind is SegmentKind.BLOCK:
                    self._run_block(segment, micro_batch)
                else:
                    self._run_rest(segment, micro_batch)
        gradients = self._sums.finish(segment.id) if self._sums and is_turn else None
        self._hooks.after(segment.id, phase, gradients)

    def _run_block(self, segment: Segment, micro_batch: MicroBatch) -> None:
        if not micro_batch.waits_for(self._stretch[segment.id]):
            return  # It leaves the block out.
        call, micro_batch.call = micro_batch.call, None
        assert call is not None
        self._use_random_state(micro_batch)
        with _told(f"in block {segment.name}, forward of micro-batch {micro_batch.index}"):
            micro_batch.reply, visit = self._runners[segment.id].forward(
                call,
                micro_batch=micro_batch.index,
                choices=self._choices.get(segment.id, _NOTHING_CHOSEN),
                keys=micro_batch.keys,
                attributes=micro_batch.attributes,
                modes=micro_batch.modes,
            )
        if visit is not None:
            micro_batch.visits[segment.id] = visit
            micro_batch.hooks.add([tensor for tensor, _ in visit.entered], micro_batch.reply)
        if visit is None or visit.may_have_drawn:
            self._note_random_state(micro_batch)
        del call
        # A rest that follows needs weights of its own, for which all micro-batches wait.
        if self._segments[BlockId(segment.id + 1)].kind is SegmentKind.BLOCK:
            self._advance(micro_batch)

    def _run_rest(self, segment: Segment, micro_batch: MicroBatch) -> None:
        if micro_batch.call is None and not micro_batch.strand.is_over:
            micro_batch.position_of_rest = self._stretch[segment.id]
            micro_batch.is_at_last_rest = segment is self._segments.last
            self._advance(micro_batch)
        if segment is not self._segments.last:
            return
        loss = micro_batch.strand.result()
        self._end_random_numbers(micro_batch)
        for block, visit in micro_batch.visits.items():
            visit.refuse_other_objects(f"block {self._segments[block].name}")
        if self._sums is not None:
            if not loss.requires_grad:
                raise ConfigError(
                    f"the loss of micro-batch {micro_batch.index} does not depend on any "
                    "trainable parameter",
                    why="there is no gradient to follow",
                    remedy="unfreeze parameters, and do not detach in the loss function",
                )
            with _told(f"backward of {where(micro_batch)}"):
                rest_backward(
                    [(edge_of(loss), torch.ones_like(loss))],
                    pending=micro_batch.pending,
                    start=micro_batch.starts[-1],
                    hooked=micro_batch.hooks.hooked,
                    add_to_parameter=functools.partial(self._add, segment, micro_batch),
                )
            self._settle(segment, micro_batch)
        self.losses.append(loss.detach())

    def _advance(self, micro_batch: MicroBatch) -> None:
        """Run the model to its next block or its end, and check what it did with its tensors."""
        self._use_random_state(micro_batch)
        with _told(f"in {where(micro_batch)}"):
            micro_batch.advance()
        self._note_random_state(micro_batch)
        if micro_batch.call is not None:
            micro_batch.hooks.look()
        for segment, visit in micro_batch.visits.items():
            if visit.entered or visit.sharing:
                visit.forget_inputs(f"block {self._segments[segment].name}")

    def _check_in_place(self, segment: Segment) -> None:
        borrowed = [(self._sets[owner], name) for name, owner in segment.borrowed]
        own = [(self._sets[segment.id], name) for name in segment.parameters]
        for parameters, name in (*own, *borrowed):
            if not parameters.has(name):
                raise bug(f"segment {segment.name} is to run and {name} is not in place")

    def _in_place(self, segment: Segment) -> contextlib.AbstractContextManager[None]:
        if segment.kind is SegmentKind.BLOCK:
            return self._runners[segment.id].in_place()
        return contextlib.nullcontext()

    def _unchanged(self, segment: Segment) -> contextlib.AbstractContextManager[None]:
        owners = [(name, segment.id) for name in segment.parameters]
        used = {
            name: self._sets[owner].parameters[name] for name, owner in (*owners, *segment.borrowed)
        }
        return weights_unchanged(used, segment.name, should_look_closely=self._should_look_closely)

    # Random numbers

    def _predict_random_states(self) -> None:
        state = begin = self._generators.state()
        group, groups = 0, [*self._groups.of, None]
        for micro_batch, signature in zip(self._micro_batches, self._signatures, strict=True):
            if self._group_of(micro_batch) != group:
                group = self._group_of(micro_batch)
                state = self._generators.state_of_group(begin, group, self._groups.step)
            micro_batch.random_state = micro_batch.random_state_first = state
            is_last = groups[micro_batch.index + 1] != group
            if not is_last:
                self._generators.set_state(state)
                self._ledger.advance(signature)
                state = micro_batch.random_state_expected = self._generators.state()

    def _use_random_state(self, micro_batch: MicroBatch) -> None:
        """The generators go on from where this micro-batch left them."""
        if self._random_state is not micro_batch.random_state:
            self._generators.set_state(micro_batch.random_state)
            self._random_state = micro_batch.random_state

    def _note_random_state(self, micro_batch: MicroBatch) -> None:
        before, now = micro_batch.random_state, self._generators.state()
        micro_batch.random_state = self._random_state = now
        expected = micro_batch.random_state_expected
        if expected is not None and same_state(before, expected) and not same_state(now, before):
            self._refuse_draws(micro_batch)

    def _end_random_numbers(self, micro_batch: MicroBatch) -> None:
        expected = micro_batch.random_state_expected
        if expected is not None and not same_state(micro_batch.random_state, expected):
            self._refuse_draws(micro_batch)
        if self._shared is not None:
            drawn = self._generators.drawn(micro_batch.random_state_first, micro_batch.random_state)
            signature = self._signatures[micro_batch.index]
            self._ledger.learn(signature, [*micro_batch.draws, *drawn])

    def _group_of(self, micro_batch: MicroBatch) -> int:
        return self._groups.of[micro_batch.index]

    def _refuse_draws(self, micro_batch: MicroBatch) -> None:
        self._ledger.forget(self._signatures[micro_batch.index])
        raise DrawsUnknown(
            f"{where(micro_batch)} drew random numbers in an amount that was not known",
            why="later micro-batches started from the state it was expected to leave",
            remedy="let the amount depend on shapes and on modes of modules only, not on values; "
            "or give each step one micro-batch",
        )

    # Backward

    def backward(self) -> None:
        """From the turn back to the first segment."""
        for segment in reversed(self._segments.segments[:-1]):
            if segment.id in self._with_backward or self._has_gradients_for(segment):
                self._visit_backward(segment)
        for micro_batch in self._micro_batches:
            ends = micro_batch.pending.take_where(lambda node: leaf_of(node) is not None)
            for (node, _), gradient in ends:
                add_to_leaf(leaf_of(node), gradient)
        if any(len(one.pending) for one in self._micro_batches):
            raise ConfigError(
                "gradients were left that belong to none of the micro-batches that got them",
                why="one has used tensors of another: they go through the model side by side, and "
                "share what is inside of a list or mapping of a module",
                remedy="let the forward begin with a container of its own (`self.losses = []`, "
                "not `self.losses.clear()`), or give each step one micro-batch",
            )

    def _has_gradients_for(self, segment: Segment) -> bool:
        """Gradients may go further back than parameters do: into a leaf of the batch."""
        if segment.kind is SegmentKind.BLOCK:
            return any(segment.id in one.visits for one in self._micro_batches)
        return any(len(one.pending) for one in self._micro_batches)

    def _visit_backward(self, segment: Segment) -> None:
        assert self._sums is not None
        self._hooks.before(segment.id, Phase.BACKWARD)
        if segment.kind is SegmentKind.BLOCK:
            # A rest goes backward through the graph of its forward, which may need no weights (a
            # lookup does not); where it does, `weights_by_place` finds them or says so.
            self._check_in_place(segment)
        with self._unhooked(segment), self._in_place(segment):
            for micro_batch in self._micro_batches:
                told = _told(f"in {segment.name}, backward of micro-batch {micro_batch.index}")
                with told, micro_batch.attributes.in_backward():
                    if segment.kind is SegmentKind.BLOCK:
                        self._block_backward(segment, micro_batch)
                    else:
                        self._stretch_backward(segment, micro_batch)
                    self._settle(segment, micro_batch)
        self._hooks.after(segment.id, Phase.BACKWARD, self._sums.finish(segment.id))

    def _block_backward(self, segment: Segment, micro_batch: MicroBatch) -> None:
        visit = micro_batch.visits.pop(segment.id, None)
        if visit is not None:
            self._current = (segment, micro_batch)
            try:
                self._runners[segment.id].backward(
                    visit,
                    pending=micro_batch.pending,
                    take_gradient=self._take_gradient,
                    should_check=micro_batch is self._micro_batches[0],
                    on_recomputed=lambda: self._hooks.recomputed(segment.id),
                )
            finally:
                self._current = None
        if self._segments[BlockId(segment.id - 1)].kind is SegmentKind.BLOCK:
            self._settle(segment, micro_batch)
            self._stretch_backward(segment, micro_batch)

    def _stretch_backward(self, segment: Segment, micro_batch: MicroBatch) -> None:
        """Back through the rest in front of a block, or the rest that is the segment itself."""
        start = micro_batch.starts[self._stretch[segment.id]]

        def is_in_stretch(node: Node) -> bool:
            is_own = leaf_of(node) is None and not is_exit(node)
            return is_own and node._sequence_nr() >= start

        rest_backward(
            micro_batch.pending.take_where(is_in_stretch),
            pending=micro_batch.pending,
            start=start,
            hooked=micro_batch.hooks.hooked,
            add_to_parameter=functools.partial(self._add, segment, micro_batch),
        )

    # Gradients of parameters

    @contextlib.contextmanager
    def _unhooked(self, segment: Segment) -> Iterator[None]:
        """Put aside hooks that users have on parameters which a segment borrows: they are for
        whole gradients, and this one is not whole before its owner has run backward."""
        borrowed = [self._sets[owner].parameters[name] for name, owner in segment.borrowed]
        hooks = [(p, p._backward_hooks) for p in borrowed if p._backward_hooks]
        try:
            for parameter, _ in hooks:
                parameter._backward_hooks = None
            yield
        finally:
            for parameter, own in hooks:
                parameter._backward_hooks = own

    def _take_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """A block has sent a micro-batch's gradient to one of its parameters."""
        assert self._current is not None
        segment, micro_batch = self._current
        assert self._sums is not None
        if self._sums.owner(parameter) == segment.id:
            # Whole by now: code in front of the block runs without its weights. Left to `_settle`,
            # all gradients of the block would be there twice.
            self._sums.add(parameter, gradient, self._row_of(micro_batch))
        else:
            self._add(segment, micro_batch, parameter, gradient)

    def _add(
        self,
        segment: Segment,
        micro_batch: MicroBatch,
        parameter: torch.nn.Parameter,
        gradient: torch.Tensor,
    ) -> None:
        # A parameter's gradient is whole once the first segment that uses it has run backward;
        # until then the sums of different micro-batches must not be mixed.
        assert self._sums is not None
        owner = self._sums.owner(parameter)
        if owner is None:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} that is not the model's got a "
                f"gradient in {segment.name}",
                why="it has no states, and no optimizer here would update it",
                remedy="make it a parameter of the model that is attached, or detach it",
            )
        if owner > segment.id:
            raise ScheduleError(
                f"a parameter of shape {tuple(parameter.shape)} is used in {segment.name} and "
                "belongs to a later segment",
                why="the gradients of that segment have left",
                remedy="let every forward pass use the same parameters in the same order",
            )
        micro_batch.pending.put_parameter(parameter, gradient)

    def _settle(self, segment: Segment, micro_batch: MicroBatch) -> None:
        """The segment is done with a micro-batch: sums of its own parameters are whole."""
        assert self._sums is not None
        if not micro_batch.pending.has_parameters:
            return
        own = list(self._sets[segment.id].parameters.values())
        for parameter, gradient in zip(own, micro_batch.pending.take_all(own), strict=True):
            if gradient is not None:
                self._sums.add(parameter, gradient, self._row_of(micro_batch))

    def _row_of(self, micro_batch: MicroBatch) -> int:
        return (self._group_of(micro_batch) - self._groups.first) // self._groups.every


def _stretches(segments: SegmentMap) -> dict[BlockId, int]:
    """For a block the number of the stretch in front of it, for a rest its own."""
    numbers, num_blocks = {}, 0
    for segment in segments:
        numbers[segment.id] = num_blocks
        num_blocks += segment.kind is SegmentKind.BLOCK
    return numbers


@contextlib.contextmanager
def _told(story: str) -> Iterator[None]:
    """Errors of the user's code keep their type and get told where they happened."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"lohan: {story}")
        raise
