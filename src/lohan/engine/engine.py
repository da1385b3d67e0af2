"""The engine: trains an ordinary PyTorch model whose states live on SSD.

Owns the run from attach to close: which plan is in use, sealing, what can be asked, whether it can
still be used, and what happens when something fails. How a step runs is `step`. Called by users,
and by `train`. Everything here runs on the main thread.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from lohan.closing import Closing
from lohan.drive import LossFunction
from lohan.engine.loss import LossScale
from lohan.engine.model_buffers import ModelBuffers
from lohan.engine.planning.plan_run import PlannedRun, faster_plan
from lohan.engine.planning.traced_model import BatchSizes
from lohan.engine.ranks import agreement, covering_sizes, deal_step
from lohan.engine.results import (
    RunCounters,
    Sealed,
    StepResult,
    of_one_step,
    seal_metadata,
    sealed_counters,
)
from lohan.engine.run_setup import RunSetup
from lohan.engine.running import RunningPlan, start_running
from lohan.engine.step import (
    Books,
    begin_record,
    finish_updates,
    forward_only,
    learn_draws,
    take_step,
)
from lohan.errors import CheckpointError, OutOfSpace, ScheduleError
from lohan.hardware.machine import Machine
from lohan.lanes.step_record import refuse_replaced
from lohan.optimizer.torch_optimizer import AdamW
from lohan.parallel.exchange import whole_tensors
from lohan.plan.plan import Plan
from lohan.simulate import SimulatedStep
from lohan.store import StateLayout, StateStore, StoreCounters
from lohan.trace import Recorder, Trace

_NUM_TRACED_SPANS = 20_000


class Engine:
    """Made by `attach`; a context manager. One step at a time, from one thread.

    After a failure nothing more can be done with it but `close`: the last seal is intact, and the
    run can be attached again from it.
    """

    def __init__(self, setup: RunSetup, optimizer: AdamW, buffers: ModelBuffers) -> None:
        """Called by `attach`."""
        self._setup, self.optimizer, self._buffers = setup, optimizer, buffers
        self.model, self.device = setup.model, setup.device
        counters = RunCounters(
            scale=LossScale() if setup.dtype is torch.float16 else None,
            reduction_groups=setup.reduction_groups,
        )
        counted = sealed_counters(setup.store.sealed)
        if counted is not None:
            counters.take(counted)
        self._books = Books(counters=counters)
        self._recorder = Recorder(is_on=setup.options.is_tracing, capacity_spans=_NUM_TRACED_SPANS)
        self._running: RunningPlan | None = None
        self._failure: BaseException | None = None
        """For good: the states in work are of two steps."""
        self._is_closed = self._is_working = False

    # What a user does --------------------------------------------------------------------------

    def step(
        self,
        micro_batches: Sequence[Any],
        loss_fn: LossFunction | None = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> StepResult:
        """One optimizer step over a list of micro-batches; among ranks, over those of this one.

        The loss of a micro-batch is `loss_fn(model, batch)` or that of `model(**batch)`; the
        step's is their sum with `weights`, which are by default each one's share of the labels that
        count (other than -100, and those of first tokens as the loss treats them), or equal shares.
        Among ranks every one calls this for every step, and gets the losses of all.

        Raises:
            ConfigError: bad input, or a model that cannot be driven block by block.
            DoesNotFit: the batch needs more memory than allowed; nothing was changed.
            NonFiniteGradients: and the policy is to stop.
            StorageError: a drive failed.
        """
        self._refuse_if_over()
        setup = self._setup
        loss_fn = loss_fn if loss_fn is not None else setup.options.loss_fn
        attached = {n: p for own in setup.sets.values() for n, p in own.parameters.items()}

        def checked() -> list[Any]:
            refuse_replaced(self.model, attached)
            return setup.on_device(micro_batches)

        batches, dealt = deal_step(
            setup,
            checked,
            weights,
            num_steps=self.num_steps,
            rates=lambda: setup.rates_of(self.optimizer),
            counts_first_label=lambda batch: setup.traced.counts_first_label(batch, loss_fn),
        )
        rates, running = setup.rates_of(self.optimizer), self._plan_for(batches, dealt.sizes)
        with self._failing_for_good():
            learn_draws(setup, running, batches, loss_fn)
            refuse_replaced(self.model, attached)
            record = begin_record(setup, self._books.counters, self.optimizer, rates)
            result = take_step(setup, running, self._books, record, batches, dealt, loss_fn)
            self._learn_machine(running)
        self.optimizer.note_step()
        return result

    def prepare(self, micro_batches: Sequence[Any], *, may_shrink: bool = False) -> None:
        """Plan for steps up to this size before the first one is taken. Nothing is computed.

        Args:
            micro_batches: of the largest step.
            may_shrink: plan anew, too, where the plan in use is for larger batches, as of an
                evaluation.

        Raises:
            ConfigError: bad input, or a model that cannot be driven block by block.
            DoesNotFit: a step of this size needs more memory than allowed.
        """
        self._refuse_if_over()
        batches = self._setup.on_device(micro_batches)
        self._plan_for(batches, covering_sizes(self._setup, batches), may_shrink=may_shrink)

    def evaluate(self, batches: Sequence[Any], loss_fn: LossFunction | None = None) -> list[float]:
        """Losses of batches, without gradients. `model.eval()` is the caller's. Among ranks, of
        this one's; all call it.

        Raises as `step` does.
        """
        self._refuse_if_over()
        given = self._setup.on_device(batches)
        loss_fn = loss_fn if loss_fn is not None else self._setup.options.loss_fn
        losses: list[float] = []
        size = self._running.planned.sizes.num_micro_batches if self._running is not None else 1
        most = max(self._setup.peers.share(len(given), what="the batches of an evaluation"))
        for first in range(0, most, size):
            group = given[first : first + size]
            running = self._plan_for(group, covering_sizes(self._setup, group))
            with self._failing_for_good():
                learn_draws(self._setup, running, group, loss_fn)
                finish_updates(running)
                with forward_only(self._setup, running):
                    # A rank that has no more goes along with the others.
                    found = running.model.evaluate(group, loss_fn) if group else []
                losses += [float(loss) for loss in found]
        return losses

    def weights(self, *, are_frozen_wanted: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and fp32 master, one at a time, from SSD; or the trained ones.

        Among ranks all of them ask, to the end, and each gets all.
        """
        self.synchronize()
        found = self._setup.store.masters(are_frozen_wanted=are_frozen_wanted)
        yield from self._whole(found, count=1, is_trained_only=not are_frozen_wanted)

    def moments(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, first and second moment of every trainable parameter, one at a time; among ranks
        as `weights`."""
        self.synchronize()
        yield from self._whole(self._setup.store.moments(), count=2, is_trained_only=True)

    def _whole(self, found: Iterator[Any], *, count: int, is_trained_only: bool) -> Iterator[Any]:
        """States as they are read, put together from the slices of all ranks."""
        peers, layout = self._setup.peers, self._setup.layout
        if peers.num_ranks > 1:
            found = whole_tensors(
                peers, layout, found, count=count, is_trained_only=is_trained_only
            )
        return of_one_step(found, lambda: self.num_steps)

    def synchronize(self) -> None:
        """Finish the updates of all steps so far. Raises as `step` does."""
        self._refuse_if_over()
        if self._running is not None:
            with self._failing_for_good():
                finish_updates(self._running)

    def seal(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Make this the point a later `attach(run=...)` goes on from; crash-safe. Among ranks all
        seal, and the seal counts once every one has.

        Args:
            metadata: plain JSON values to find again in `sealed`.

        Raises:
            StorageError, CheckpointError: the seal before is still the one.
            ConfigError: the metadata is not plain JSON.
        """
        self.synchronize()
        self._setup.store.seal(
            step=self.num_steps,
            metadata=seal_metadata(
                counters=self.counters, buffers=self.buffers, user=metadata or {}
            ),
            agree=agreement(self._setup.peers, self._setup.run),
        )

    def close(self, *, should_delete: bool = False) -> None:
        """End the run. What was sealed stays on SSD unless `should_delete`. Twice is fine."""
        if self._is_closed:
            return
        self._refuse_if_working()
        self._is_closed = True
        with Closing() as stack:
            stack.callback(self._setup.peers.leave)
            stack.callback(self._setup.close, should_delete=should_delete)
            self._stop_running(should_finish=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What can be asked between steps: nothing here changes anything --------------------------

    @property
    def run_id(self) -> str:
        """Names the run's directories on the SSDs; `attach(run=...)` takes it up again."""
        return self._setup.run_id

    @property
    def reduction_groups(self) -> int:
        """Groups that a step's micro-batches are dealt to."""
        return self._setup.reduction_groups

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, skipped ones included."""
        return self._books.counters.num_steps

    @property
    def counters(self) -> dict[str, Any]:
        """What a copy of the states needs besides them: `attach(counters=...)` takes it."""
        return self._books.counters.to_json()

    @property
    def buffers(self) -> dict[str, Any]:
        """The model's persistent buffers for such a copy: `attach(buffers=...)` takes it."""
        return self._buffers.to_json()

    @property
    def sealed(self) -> Sealed | None:
        """The last resume point."""
        return Sealed.of(self._setup.store.sealed)

    @property
    def due_bytes(self) -> int:
        """What a seal would write now, once updates are finished: states that live in RAM."""
        return self._setup.store.due_bytes

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first step."""
        return self._running.planned.plan if self._running is not None else None

    @property
    def machine(self) -> Machine:
        """What the plan counts on: as measured, and after the first steps as they showed it."""
        return self._setup.machine

    @property
    def gpu_peak_bytes(self) -> int | None:
        """Most held at once on the device; None where it computes in main memory."""
        device = self._setup.device
        return None if device.shares_ram else device.peak_bytes

    @property
    def gpu_reserved_bytes(self) -> int | None:
        """Most that the device's allocator had at once for that; None where it has no more."""
        return self._setup.device.reserved_peak_bytes

    @property
    def prediction(self) -> SimulatedStep | None:
        """What the simulator says the next step takes, by what steps have shown so far; None
        before the first plan."""
        return None if self._running is None else self._books.predictions.of(self._running.planned)

    @property
    def rates_note(self) -> str:
        """What to know about the rates of drives in predictions; empty once steps have shown
        them."""
        return "" if self._books.predictions.has_learned else self._setup.known.note

    @property
    def captured_blocks(self) -> list[str]:
        """Of each block that has gone backward: captured, or why its own code runs."""
        return self._setup.captures.report()

    @property
    def is_rehearsing(self) -> bool:
        """Whether a loss function is called only to count its draws; its result is thrown away."""
        return self._running is not None and self._running.model.is_learning_draws

    @property
    def store(self) -> StateStore:
        """The states."""
        return self._setup.store

    @property
    def layout(self) -> StateLayout:
        """Where the whole model's states lie; among ranks the store has a slice of them."""
        return self._setup.layout

    @property
    def written_bytes(self) -> int:
        """Written to the SSDs by attaching and since: to measure them, first states, steps,
        seals."""
        return self._setup.written_bytes

    @property
    def measuring_bytes(self) -> int:
        """As much of that as was written to measure the SSDs."""
        return self._setup.known.written_bytes

    @property
    def traffic(self) -> StoreCounters:
        """SSD traffic of the plan in use. What a step moves goes on after its call has ended: for
        exact figures ask after `synchronize`."""
        return self._running.counters if self._running is not None else StoreCounters()

    @property
    def ram_peak_bytes(self) -> int:
        """Most main memory held at once by buffers and resident states, of all plans so far."""
        buffers = self._running.host.peak_bytes if self._running is not None else 0
        return max(buffers, self._setup.past_buffers_bytes) + self.store.ram_peak_bytes

    def trace(self) -> Trace:
        """What the lanes did so far (the newest spans), if the engine was attached to trace."""
        plan = self.plan
        return self._recorder.trace(
            f"{plan.policy if plan else 'no plan'} on {self._setup.device.name}",
            budgets_bytes=dict(plan.ledger.budgets) if plan else None,
        )

    def predicted_trace(self) -> Trace | None:
        """The same lanes and tasks as the simulator sees them; None before the first step."""
        return self._running.predicted_trace() if self._running is not None else None

    # Plans -------------------------------------------------------------------------------------

    def _plan_for(
        self, batches: list[Any], sizes: BatchSizes, *, may_shrink: bool = False
    ) -> RunningPlan:
        """`sizes` cover the batches, those of all ranks; the first of these plans for all."""
        if self._running is not None:
            known = self._running.planned.sizes
            if may_shrink:
                sizes = replace(sizes, is_padded=sizes.is_padded or known.is_padded)
            if known == sizes or (known.covers(sizes) and not may_shrink):
                return self._running
            sizes = sizes if may_shrink else known.with_room_for(sizes)
            with self._failing_for_good():
                finish_updates(self._running)
        (setup := self._setup).options.tell(f"planning for {sizes}")
        planned = setup.peers.from_first(
            lambda: setup.plan(setup.traced.shape(sizes, batches), sizes), what="the plan"
        )
        self._books.predictions.plan_changes(is_same_size=False)
        self._stop_running(should_finish=True)
        if setup.residents is None:
            with self._failing_for_good():
                setup.make_residents(planned.plan)
        return self._run_plan(planned)

    def _run_plan(self, planned: PlannedRun) -> RunningPlan:
        self._running = start_running(
            self._setup, planned, recorder=self._recorder, on_finish=self._books.load.add
        )
        return self._running

    def _learn_machine(self, running: RunningPlan) -> None:
        """After some steps: take the plan that the rates they showed suggest if it is clearly
        faster. States that live in RAM stay there. Ranks see different rates and keep theirs."""
        if self._setup.peers.num_ranks > 1:
            return
        before, setup = running.planned, self._setup
        refined = self._books.predictions.machine_to_plan_for(before)
        if refined is None:
            return
        setup.machine = refined
        setup.known.note_learned(refined)
        running.planned = replace(before, machine=refined)
        is_fixed = callable(setup.options.policy)
        planned = None if is_fixed else faster_plan(before, setup.machine, setup.plan)
        if planned is not None:
            self._books.predictions.plan_changes(is_same_size=True)
            finish_updates(running)
            self._stop_running(should_finish=True)
            try:
                self._run_plan(planned)
            except OutOfSpace:
                # A plan that only would be faster must not end the run.
                self._run_plan(running.planned)

    def _stop_running(self, *, should_finish: bool) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            held_bytes = running.host.peak_bytes
            self._setup.past_buffers_bytes = max(self._setup.past_buffers_bytes, held_bytes)
            running.close(should_finish=should_finish and self._failure is None)

    # Failure -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Work that nothing may come between. A failure inside is the end: lanes stop, everything
        in flight is let go."""
        self._is_working = True
        try:
            yield
        except BaseException as error:
            if self._failure is None:
                self._failure = error
            self._fail(error)
            raise
        finally:
            self._is_working = False

    def _fail(self, error: BaseException) -> None:
        self._setup.peers.tell_failure(error)
        if self._running is not None:
            running, self._running = self._running, None
            running.fail(error)
        self._setup.peers.leave()

    def _refuse_if_over(self) -> None:
        """Before anything is done.

        Raises:
            ScheduleError: the engine is closed, or at work.
            CheckpointError: it has failed; says from where to go on.
        """
        if self._is_closed:
            raise ScheduleError(
                "the engine is closed",
                why="its states have been let go",
                remedy="attach again with the run's id",
            )
        failure, seal = self._failure, self.sealed
        if failure is not None:
            raise CheckpointError(
                f"the engine has failed before ({type(failure).__name__}: {failure})",
                why="a step was left in the middle, so the states in work are of two steps",
                remedy=f"attach again with run={self.run_id!r}: it goes on from step "
                f"{seal.step if seal else 'none: nothing was sealed'}",
            ) from failure
        self._refuse_if_working()

    def _refuse_if_working(self) -> None:
        if self._is_working:
            raise ScheduleError(
                "the engine was called from within its own work",
                why="a step goes on until it returns or raises: lanes, buffers and states are its",
                remedy="call it after the step, from one thread; to end a step, raise an exception "
                "in the loss function or press Ctrl-C",
            )
