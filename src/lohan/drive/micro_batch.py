"""One micro-batch on its way through the model: its strand, and what it leaves for backward.

Owns the call of the user's model (on the strand's thread) and the interception of its blocks:
while a step runs, calling a block asks the driving thread for the block's outputs. Does not run
blocks. Called by `segmented_model`; see `micro_batch_threads`, note "One at a time".
"""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lohan.drive.block_visit import BlockCall, BlockVisit
from lohan.drive.captured.graphs import outside_values, settings_of
from lohan.drive.edges.cuts import PendingGradients
from lohan.drive.edges.entries import EntryKeys
from lohan.drive.edges.exits import HookWatch
from lohan.drive.micro_batch_threads import Strand
from lohan.drive.outside_run import PresenceMode, weights_by_place
from lohan.drive.surroundings.ambient import Ambient, process_settings, put_process_settings
from lohan.drive.surroundings.randomness import AnyDraw, DrawRecorder, RandomState
from lohan.drive.watch.collected_outputs import (
    active_collection,
    add_collected,
    returning_collected,
)
from lohan.drive.watch.own_attributes import OwnAttributes
from lohan.drive.watch.shared_mappings import as_arguments, returning_written, shared_in, write
from lohan.drive.watch.shared_state import SharedState
from lohan.drive.weights.parameter_views import Weights
from lohan.errors import ConfigError, ScheduleError
from lohan.vocabulary import BlockId

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]


class MicroBatch:
    """State of one micro-batch during a step."""

    def __init__(
        self,
        index: int,
        run: Callable[["MicroBatch"], torch.Tensor],
        attributes: OwnAttributes,
        shared: SharedState | None = None,
    ) -> None:
        """`shared`: to be told what runs, if its draws are to be learned."""
        self.index = index
        self.attributes = attributes
        self.strand: Strand[BlockCall | None, torch.Tensor] = Strand(
            self._body, name=f"lohan-micro-batch-{index}"
        )
        self._run = run
        self.call: BlockCall | None = None
        """The block call that waits to be run."""
        self.reply: Any = None
        """Outputs of the last block, for the model."""
        self.starts: list[int] = []
        """Sequence number of the first operator of each stretch of the rest: before the first
        block, between each two, after the last."""
        self.num_blocks_passed = 0
        """Called or left out, the one it waits for included."""
        self.position_of_rest, self.is_at_last_rest = 0, False
        """How many blocks are in front of the part of the rest that runs."""
        self.absence: ScheduleError | None = None
        """Why it last waited for weights."""
        self.weight_copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Weights that were arguments of blocks, by id, and their copies."""
        self.settings = process_settings()
        """Of the process, while others run."""
        self.hooks = HookWatch()
        self.keys = EntryKeys()
        self.visits: dict[BlockId, BlockVisit] = {}
        self.pending = PendingGradients()
        self.draws: list[AnyDraw | None] = []
        self.modes: list[TorchDispatchMode] = []
        """To be entered wherever operators of the model run."""
        if shared is not None:
            self.modes = [DrawRecorder(self.draws), shared.mode()]
        self.random_state: RandomState = ()
        self.random_state_first: RandomState = ()
        """State at the start of its forward."""
        self.random_state_expected: RandomState | None = None
        """State at the end of its forward, from which the next micro-batch already started."""

    def _body(self, ask: Callable[[BlockCall | None], Any]) -> torch.Tensor:
        """Runs on the strand's thread: the whole forward of the model."""
        self._ask = ask
        self._begin_stretch()
        self.attributes.begin()
        try:
            return self._run(self)
        finally:
            self.attributes.pause()

    def ask_for_block(self, call: BlockCall) -> Any:
        """Runs on the strand's thread; blocks until the block's outputs are there."""
        self.num_blocks_passed += 1
        outputs = self._pause(call)
        self._begin_stretch()
        return outputs

    def wait_for_weights(self, absence: ScheduleError) -> None:
        """Wait for the next part of the rest, whose weights this one runs into because it has left
        the blocks in between out. Runs on the strand's thread, within the operator that needs them.

        Raises:
            ScheduleError: there is no such part.
        """
        if self.is_at_last_rest:
            raise absence
        self.absence = absence
        self._pause(None)
        # The operator's own node is behind it: it goes backward with its weights.
        self.leave_out(self.position_of_rest, num_nodes_behind=1)

    def _pause(self, call: BlockCall | None) -> Any:
        self.attributes.pause()
        settings = process_settings()
        put_process_settings(self.settings)
        try:
            reply = self._ask(call)
        finally:
            put_process_settings(settings)
        self.attributes.begin()
        return reply

    def leave_out(self, until: int, *, num_nodes_behind: int = 0) -> None:
        """The model does not call its blocks up to this one. Runs on the strand's thread."""
        for _ in range(self.num_blocks_passed, until):
            self._begin_stretch(num_nodes_behind)
        self.num_blocks_passed = max(until, self.num_blocks_passed)

    def waits_for(self, position: int) -> bool:
        """Whether it has called the block in this place, and not left it out."""
        return self.call is not None and self.num_blocks_passed == position + 1

    def _begin_stretch(self, num_nodes_behind: int = 0) -> None:
        # Sequence numbers are counted per thread, so those of one micro-batch are comparable.
        self.starts.append(torch._C._autograd._get_sequence_nr() - num_nodes_behind)

    def advance(self) -> None:
        """Run the model until it calls a block or ends."""
        reply, self.reply = self.reply, None
        self.call = self.strand.resume(reply)


class BlockInterceptor:
    """For the time of a step, sends calls of the model's blocks to the driving thread.

    The forward of the module is replaced, not its call: hooks that users put on a block run once,
    as part of the rest. Blocks are called in the order of the segment map, or left out.
    """

    def __init__(
        self,
        names: Sequence[str],
        modules: Sequence[torch.nn.Module],
        weights: Weights,
        device_types: tuple[str, ...],
        outside: Sequence[torch.nn.Module] = (),
        unused: Container[str] = (),
    ) -> None:
        """`outside`: the modules of the model that are in no block; `unused`: blocks that were not
        planned for."""
        self._outside, self._unused = outside, unused
        self._parts: dict[torch.nn.Module, list[torch.nn.Module]] = {}
        self._names, self._modules = tuple(names), tuple(modules)
        self._weights, self._device_types = weights, device_types
        self._running: dict[int, MicroBatch] = {}  # by thread

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Runs on the driving thread."""
        distinct = dict.fromkeys(self._modules)
        replaced: list[tuple[torch.nn.Module, Any]] = []
        try:
            self._parts = {module: list(module.modules()) for module in distinct}
            for module in distinct:
                replaced.append((module, vars(module).get("forward")))
                module.forward = self._intercept(module, module.forward)
            yield
        finally:
            for module, own in replaced:
                del module.forward
                if own is not None:
                    module.forward = own

    @contextlib.contextmanager
    def for_this_thread(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Runs on a strand's thread: block calls on it are those of `micro_batch`."""
        self._running[threading.get_ident()] = micro_batch
        try:
            yield
        finally:
            del self._running[threading.get_ident()]

    def _intercept(
        self, module: torch.nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call_block(*args: Any, **kwargs: Any) -> Any:
            micro_batch = self._running.get(threading.get_ident())
            if micro_batch is None:
                raise ConfigError(
                    f"block {self._names[self._modules.index(module)]} was called outside the "
                    "model's forward",
                    why="only a forward is divided among the micro-batches; code that runs blocks "
                    "again by itself (checkpointing) or in threads of its own cannot be followed",
                    remedy="switch checkpointing off, and call blocks in `forward` itself",
                )
            self._check_order(micro_batch, module)
            shared = shared_in(kwargs)
            leaves, spec = tree_flatten((args, as_arguments(kwargs, shared) if shared else kwargs))
            ambient = Ambient.here(self._device_types)
            with torch._C.DisableTorchFunctionSubclass():  # of parameters that are away
                settings, why_not = settings_of(self._parts[module])
            run, collection = forward, active_collection()
            if collection is not None:
                run = returning_collected(run, collection)
            if shared:
                run = returning_written(run, shared)
            outputs = micro_batch.ask_for_block(
                BlockCall(
                    forward=_within(contextvars.copy_context(), run),
                    leaves=[self._without_weight(micro_batch, leaf) for leaf in leaves],
                    spec=spec,
                    ambient=ambient,
                    settings=(outside_values(self._outside), settings),
                    why_not=why_not,
                )
            )
            if shared:
                outputs, written = outputs
                write(shared, written)
            if collection is not None:
                outputs, found = outputs
                add_collected(collection, found)
            return outputs

        call_block.__module__ = __name__  # whoever looks through the model's objects stops here
        return call_block

    def _without_weight(self, micro_batch: MicroBatch, leaf: Any) -> Any:
        """An argument, or a copy in place of a weight (or a view of one), which is about to leave.

        A weight is copied once per micro-batch and its copy used for every block, so that its
        gradients are summed in one place. Runs on the strand's thread, under autograd.
        """
        if not isinstance(leaf, torch.Tensor):
            return leaf
        copies = micro_batch.weight_copies
        if id(leaf) not in copies:
            absence = self._weights.absence(leaf, f"a block called by {where(micro_batch)}")
            if absence is not None:
                raise absence
            if self._weights.place_of(leaf) is None:
                return leaf
            copies[id(leaf)] = (leaf, leaf.clone())
        return copies[id(leaf)][1]

    def _check_order(self, micro_batch: MicroBatch, module: torch.nn.Module) -> None:
        """A block may be left out (layer drop, pictures that a batch does not have); what is called
        comes in the order of the segment map."""
        passed = micro_batch.num_blocks_passed
        called = self._names[self._modules.index(module)]
        if called in self._unused:
            raise ConfigError(
                f"micro-batch {micro_batch.index} called block {called}, which the example that "
                "the model was attached with left out",
                why="memory and time were planned without it",
                remedy="attach with example= set to a batch that uses the whole model; a trainer "
                "takes the first batch of the data set for it",
            )
        if module in self._modules[passed:]:
            micro_batch.leave_out(self._modules.index(module, passed))
            return
        if micro_batch.absence is not None:
            # It left nothing out: what it waited for was needed before the blocks that follow.
            raise micro_batch.absence
        if module is self._modules[0]:
            raise ConfigError(
                f"micro-batch {micro_batch.index} called the model again: block {called} after "
                f"{self._names[passed - 1]}, within one loss",
                why="the weights of a block are there once in a pass, and gone when the next one "
                "runs",
                remedy="put what both calls are given into one batch, and take the outputs apart; "
                "what needs no gradient can be computed before the step (engine.evaluate)",
            )
        raise ConfigError(
            f"micro-batch {micro_batch.index} called block {called} after "
            f"{self._names[passed - 1]}",
            why="a block runs at most once per forward, in a fixed order, so that its weights can "
            "be there in time",
            remedy="call blocks in the order in which the example that was attached with did",
        )

    def end(self, micro_batch: MicroBatch) -> None:
        """The model has returned; blocks it has not called are left out."""
        micro_batch.leave_out(len(self._modules))


def _within(variables: contextvars.Context, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward with the context variables of the thread that asks for it, each time anew."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return variables.copy().run(forward, *args, **kwargs)

    return run


def weighted_loss(
    model: torch.nn.Module, batch: Any, loss_fn: LossFunction | None, factor: float
) -> torch.Tensor:
    """The loss of one micro-batch as it counts for its step."""
    loss = loss_of(model, batch, loss_fn)
    return loss if factor == 1.0 else loss * factor


def loss_of(model: torch.nn.Module, batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """The loss as the user defines it: `loss_fn(model, batch)` or that of `model(**batch)`."""
    if loss_fn is not None:
        loss: Any = loss_fn(model, batch)
    else:
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"a micro-batch is a {type(batch).__name__}",
                why="without a loss function the model is called as model(**batch)",
                remedy="give dictionaries of keyword arguments, or a `loss_fn(model, batch)`",
            )
        output = model(**batch)
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, Mapping):
            loss = output.get("loss")
        if loss is None and isinstance(output, (tuple, list)) and output:
            loss = output[0]
        if loss is None and isinstance(output, torch.Tensor):
            loss = output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
        raise ConfigError(
            f"the loss is not one number but {found}",
            why="training follows the gradient of a scalar",
            remedy="pass `labels` with the batch, or a `loss_fn(model, batch)` that reduces",
        )
    return loss


def run_model(
    micro_batch: MicroBatch,
    *,
    loss: Callable[[], torch.Tensor],
    ambient: Ambient,
    weights: Weights,
    interceptor: BlockInterceptor,
    enter_thread: Callable[[], contextlib.AbstractContextManager[Any]],
    num_threads: int,
) -> torch.Tensor:
    """Runs on a strand's thread: the user's code, in the settings of the thread that drives."""
    torch.set_num_threads(num_threads)  # counted per thread; sums may depend on it
    with contextlib.ExitStack() as stack:
        stack.enter_context(enter_thread())
        stack.enter_context(interceptor.for_this_thread(micro_batch))
        stack.enter_context(ambient.applied())
        stack.enter_context(weights_by_place(weights))
        for mode in micro_batch.modes:
            stack.enter_context(mode)
        stack.enter_context(
            PresenceMode(weights, micro_batch.wait_for_weights, lambda: f"in {where(micro_batch)}")
        )
        result = loss()
    interceptor.end(micro_batch)
    return result


def where(micro_batch: MicroBatch) -> str:
    """Where a micro-batch stands, for messages."""
    num_entered = micro_batch.num_blocks_passed
    return f"micro-batch {micro_batch.index} ({num_entered} blocks entered)"
