"""An ordinary model, driven block by block: the door to this package.

Owns what lasts from step to step (interception, learned draws, block runners) and the tidying up
when a step fails. Decides nothing: what is stored is in `choices`, where weights and gradients
are is up to `SegmentHooks`. Called by the engine, on the main thread.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lohan.drive.activations.store import ActivationStore, BlockChoices, LiveKeys
from lohan.drive.block_run import BlockRunner
from lohan.drive.captured.graphs import Captures
from lohan.drive.chunked_loss import loss_in_chunks
from lohan.drive.gradient_sums import GradientSums
from lohan.drive.hooks import SegmentHooks, StepGroups
from lohan.drive.micro_batch import (
    BlockInterceptor,
    LossFunction,
    MicroBatch,
    run_model,
    weighted_loss,
)
from lohan.drive.passes import Passes
from lohan.drive.segment_map import SegmentMap
from lohan.drive.surroundings.ambient import Ambient, memory_features_off
from lohan.drive.surroundings.randomness import (
    DrawLedger,
    Generators,
    draw_setting,
    signature_of,
)
from lohan.drive.watch.own_attributes import AttributeBook, OwnAttributes
from lohan.drive.watch.shared_state import SharedState
from lohan.drive.weights.offloaded import calls_allowed
from lohan.drive.weights.parameter_views import ParameterSet, Weights
from lohan.errors import ConfigError
from lohan.model.tracing.kept_contents import left_as_found
from lohan.vocabulary import BlockId


class SegmentedModel:
    """A model whose weights need not be there all at once.

    `step` gives the losses and gradients of this plain loop, bit for bit, and leaves the random
    generators as it does::

        for batch in micro_batches:
            loss_fn(model, batch).backward()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        segments: SegmentMap,
        *,
        sets: Mapping[BlockId, ParameterSet],
        hooks: SegmentHooks,
        store: ActivationStore,
        device: torch.device | str = "cpu",
        ledger: DrawLedger | None = None,
        captures: Captures | None = None,
        enter_thread: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        loss_head: torch.nn.Linear | None = None,
        loss_chunks: int = 1,
    ) -> None:
        """`ledger` remembers what batches draw and `captures` the graphs of blocks, for one driver
        after another; `enter_thread` is entered on the thread of each micro-batch (current device,
        stream); `loss_head` gives logits whose loss is computed in `loss_chunks`."""
        self.model, self.segments = model, segments
        self._sets, self._hooks, self._enter_thread = dict(sets), hooks, enter_thread
        self._device = torch.device(device)
        self._device_types = tuple(dict.fromkeys(("cpu", self._device.type)))
        self._weights = Weights(self._sets.values())
        self._loss_head, self._loss_chunks = loss_head, loss_chunks
        self._generators = Generators([self._device])
        self._ledger = ledger if ledger is not None else DrawLedger()
        self.is_learning_draws = False
        self._is_first = True
        self._shared: SharedState | None = None
        captures = captures if captures is not None else Captures()
        self._store = LiveKeys(store)
        self._named = named = dict(model.named_parameters())
        blocks = [model.get_submodule(block.name) for block in segments.blocks]
        # Code outside the blocks is taken to change nothing inside of them but their attributes.
        inside = {part for module in blocks for part in module.modules()} - set(blocks)
        outside = {path: part for path, part in model.named_modules() if part not in inside}
        self._modules = list(outside.values())
        self._runners = {
            block.id: BlockRunner(
                block=block.id,
                name=block.name,
                module=model.get_submodule(block.name),
                store=self._store,
                generators=self._generators,
                weights=self._weights,
                parameters=[named[name] for name in block.used],
                captures=captures,
                outside=outside,
            )
            for block in segments.blocks
        }
        self._interceptor = BlockInterceptor(
            [block.name for block in segments.blocks],
            blocks,
            self._weights,
            self._device_types,
            [part for part in self._modules if part not in blocks],
            segments.unused,
        )

    def step(
        self,
        micro_batches: Sequence[Any],
        loss_fn: LossFunction | None = None,
        *,
        factors: Sequence[float] | None = None,
        choices: Mapping[BlockId, BlockChoices] | None = None,
        groups: StepGroups | None = None,
    ) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches; returns their losses, each multiplied by its
        factor. `groups`: those they are of, if there are several.

        Gradients go to `SegmentHooks.after`. If anything fails the model, the store, the
        generators and the threads are as they were before, and nothing is left to stop.

        Raises:
            DrawsUnknown: random numbers in a batch shape not seen before; see `learn_draws`.
            ConfigError: the model does something that cannot be driven block by block.
        """
        self._refuse_gradients()
        return self._run(
            micro_batches,
            loss_fn,
            choices or {},
            has_gradients=True,
            factors=factors,
            groups=groups,
        )

    def evaluate(
        self, micro_batches: Sequence[Any], loss_fn: LossFunction | None = None
    ) -> list[torch.Tensor]:
        """Losses only: the same forward without gradients. Raises as `step` does."""
        return self._run(micro_batches, loss_fn, {}, has_gradients=False)

    def unknown_batches(
        self, micro_batches: Sequence[Any], loss_fn: LossFunction | None = None
    ) -> list[Any]:
        """Batches whose random numbers must be counted before they can go layer by layer with
        others: one of each shape not seen before, once a model was found to draw any."""
        if len(micro_batches) <= 1:
            return []
        setting = draw_setting(self.model, loss_fn)
        has_draws = self._ledger.has_draws.get(setting)
        # Models draw in training; a loss may at any time.
        may_draw = loss_fn is not None or any(part.training for part in self.model.modules())
        if not may_draw or has_draws is False:
            return []
        found: dict[Hashable, Any] = {}
        for batch in micro_batches:
            signature = signature_of(batch, setting)
            if not self._ledger.knows(signature):
                found.setdefault(signature, batch)
        return list(found.values())[: None if has_draws else 1]

    def learn_draws(self, batch: Any, loss_fn: LossFunction | None = None) -> None:
        """Run a batch forward only to count the random numbers it draws; leaves the generators,
        the model and all that it and the loss function hold as they were.

        Raises:
            ConfigError: micro-batches would find each other's values in the model.
        """
        before = self._generators.state()
        shared = SharedState(self.model, [runner.module for runner in self._runners.values()])
        self.is_learning_draws, self._shared = True, shared
        try:
            with left_as_found(self.model, loss_fn):
                self._run([batch], loss_fn, {}, has_gradients=False)
                shared.refuse_mixed()
        except RuntimeError as error:
            error.add_note(
                "lohan: this forward ran without gradients, to count the random numbers it draws; "
                "hooks on tensors need `if x.requires_grad:` in front"
            )
            raise
        finally:
            self.is_learning_draws, self._shared = False, None
        self._generators.set_state(before)
        setting, found = draw_setting(self.model, loss_fn), self._ledger.has_draws
        draws = self._ledger.draws(signature_of(batch, setting))
        found[setting] = found.get(setting, False) or draws

    def _run(
        self,
        batches: Sequence[Any],
        loss_fn: LossFunction | None,
        choices: Mapping[BlockId, BlockChoices],
        *,
        has_gradients: bool,
        factors: Sequence[float] | None = None,
        groups: StepGroups | None = None,
    ) -> list[torch.Tensor]:
        if not batches:
            raise ConfigError(
                "a step was given no micro-batch",
                why="there is nothing to compute",
                remedy="give at least one batch",
            )
        losses: list[Callable[[], torch.Tensor]] = [
            partial(weighted_loss, self.model, batch, loss_fn, factor)
            for batch, factor in zip(batches, factors or [1.0] * len(batches), strict=True)
        ]
        micro_batches = self._micro_batches(losses, has_gradients)
        groups = groups or StepGroups(of=(0,) * len(batches))
        sums = GradientSums(self._sets, self._hooks.gradient_buffer, groups.count)
        for runner in self._runners.values():
            runner.begin_step()
        passes = Passes(
            segments=self.segments,
            sets=self._sets,
            runners=self._runners,
            hooks=self._hooks,
            choices=choices,
            micro_batches=micro_batches,
            sums=sums if has_gradients else None,
            groups=groups,
            with_backward=self.segments.with_backward(self._named),
            should_look_closely=self._is_first,
            shared=self._shared,
        )
        self._is_first = self._is_first and not (has_gradients or self.is_learning_draws)
        signatures: list[Hashable] = [None] * len(batches)
        if len(batches) > 1 or self._shared is not None:
            # One that is alone is neither predicted nor learned, and the walk takes a while.
            setting = draw_setting(self.model, loss_fn)
            signatures = [signature_of(batch, setting) for batch in batches]
        with contextlib.ExitStack() as stack:
            # A micro-batch and its thread know each other: what they were given would stay on the
            # device until Python looks for such pairs.
            stack.callback(losses.clear)
            stack.enter_context(self._tidy(micro_batches))
            stack.enter_context(calls_allowed(self.model))
            stack.enter_context(memory_features_off(self.model))
            stack.enter_context(self._interceptor.installed())
            if self._loss_head is not None and self._loss_chunks > 1:
                stack.enter_context(loss_in_chunks(self._loss_head, self._loss_chunks))
            passes.forward(generators=self._generators, ledger=self._ledger, signatures=signatures)
            if has_gradients:
                passes.backward()
        return passes.losses

    def _micro_batches(
        self, losses: list[Callable[[], torch.Tensor]], has_gradients: bool
    ) -> list[MicroBatch]:
        with torch.set_grad_enabled(has_gradients):
            ambient = Ambient.here(self._device_types)
        num_threads = torch.get_num_threads()

        def body(micro_batch: MicroBatch) -> torch.Tensor:
            """Runs on the thread of the micro-batch."""
            return run_model(
                micro_batch,
                loss=losses[micro_batch.index],
                ambient=ambient,
                weights=self._weights,
                interceptor=self._interceptor,
                enter_thread=self._enter_thread,
                num_threads=num_threads,
            )

        book = AttributeBook(self._modules, len(losses))
        return [
            MicroBatch(index, body, OwnAttributes(book, index), self._shared)
            for index in range(len(losses))
        ]

    @contextlib.contextmanager
    def _tidy(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Leave no thread, stored activation, gradient or random draw of a failed step."""
        random_state = self._generators.state()
        try:
            yield
        except BaseException:
            for micro_batch in micro_batches:
                micro_batch.strand.stop()
                micro_batch.visits.clear()
            for parameter in self.model.parameters():
                parameter.grad = None
            self._generators.set_state(random_state)
            self._store.drop_all()
            raise
        assert not len(self._store), "an activation was left in the store"

    def _refuse_gradients(self) -> None:
        for name, parameter in self._named.items():
            if parameter.grad is not None:
                raise ConfigError(
                    f"parameter {name} has a gradient before the step",
                    why="gradients of a step are collected in flat buffers, starting from none",
                    remedy="call `model.zero_grad(set_to_none=True)`",
                )
            if parameter._post_accumulate_grad_hooks:
                raise ConfigError(
                    f"parameter {name} has a hook that runs after its gradient was added up",
                    why="gradients are added up in flat buffers and leave; `.grad` is never whole",
                    remedy="change gradients with `parameter.register_hook(...)`, or leave it out",
                )
