"""The engine: trains an ordinary PyTorch model whose states live on SSD.

Owns the run from attach to close: the plan, the lanes, the books of steps, sealing, and what
happens when something fails. The work is in the other files of this folder. Called by users, and
by `train`. Everything here runs on the main thread.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from lohan.drive import LossFunction
from lohan.engine.engine_answers import EngineAnswers
from lohan.engine.engine_life import EngineLife
from lohan.engine.loss import LossScale, counted_losses, loss_weights, num_tokens
from lohan.engine.model_buffers import ModelBuffers
from lohan.engine.planning.plan_run import PlannedRun
from lohan.engine.planning.predicting import Predictions
from lohan.engine.planning.traced_model import sizes_of
from lohan.engine.replanning import faster_plan
from lohan.engine.results import RunCounters, StepResult, of_one_step
from lohan.engine.run_setup import RunSetup
from lohan.engine.running import RunningPlan, start_running
from lohan.engine.seal_metadata import seal_metadata, sealed_counters
from lohan.errors import OutOfSpace
from lohan.lanes.lane_load import LaneLoad
from lohan.lanes.step_record import (
    StepRecord,
    groups_by_name,
    looks_at_gradients,
    refuse_replaced,
)
from lohan.optimizer.torch_optimizer import AdamW, GroupRates
from lohan.simulate.bottleneck import bottleneck_words
from lohan.simulate.learned import work_seconds
from lohan.trace import Recorder
from lohan.vocabulary import PoolName

_NUM_TRACED_SPANS = 20_000


class Engine(EngineAnswers):
    """Made by `attach`; a context manager. One step at a time, from one thread.

    After a failure nothing more can be done with it but `close`: the last seal is intact, and the
    run can be attached again from it.
    """

    def __init__(
        self, setup: RunSetup, optimizer: AdamW, buffers: ModelBuffers, *, is_tracing: bool
    ) -> None:
        """Called by `attach`."""
        self._setup, self.optimizer, self._buffers = setup, optimizer, buffers
        self.model, self.device = setup.model, setup.device
        self._counters = RunCounters(scale=LossScale() if setup.dtype is torch.float16 else None)
        self._recorder = Recorder(is_on=is_tracing, capacity_spans=_NUM_TRACED_SPANS)
        self._load = LaneLoad()
        self._predictions = Predictions()
        self._running: RunningPlan | None = None
        self._life = EngineLife()
        self._is_settled = True
        counted = sealed_counters(setup.store.sealed)
        if counted is not None:
            self._counters.take(counted)

    # What a user does --------------------------------------------------------------------------

    def step(
        self,
        micro_batches: Sequence[Any],
        loss_fn: LossFunction | None = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> StepResult:
        """One optimizer step over a list of micro-batches.

        The loss of a micro-batch is `loss_fn(model, batch)` or that of `model(**batch)`; the
        step's is their sum with `weights`, which are by default each one's share of the labels that
        count (other than -100, and those of first tokens as the loss treats them), or equal shares.

        Raises:
            ConfigError: bad input, or a model that cannot be driven block by block.
            DoesNotFit: the batch needs more memory than allowed; nothing was changed.
            NonFiniteGradients: and the policy is to stop.
            StorageError: a drive failed.
        """
        self._refuse_if_over()
        batches = self._setup.on_device(micro_batches)
        loss_fn = loss_fn if loss_fn is not None else self._setup.loss_fn
        shares = loss_weights(
            batches,
            weights,
            counts_first_label=lambda: self._setup.traced.counts_first_label(batches[0], loss_fn),
        )
        attached = {n: p for own in self._setup.sets.values() for n, p in own.parameters.items()}
        refuse_replaced(self.model, attached)
        rates, running = self._setup.rates_of(self.optimizer), self._plan_for(batches)
        with self._failing_for_good():
            self._learn_draws(running, batches, loss_fn)
            refuse_replaced(self.model, attached)
            result = self._step(running, batches, loss_fn, shares, rates)
        self.optimizer.note_step()
        return result

    def prepare(self, micro_batches: Sequence[Any]) -> None:
        """Plan for steps up to this size before the first one is taken. Nothing is computed.

        Raises:
            ConfigError: bad input, or a model that cannot be driven block by block.
            DoesNotFit: a step of this size needs more memory than allowed.
        """
        self._refuse_if_over()
        self._plan_for(self._setup.on_device(micro_batches))

    def evaluate(self, batches: Sequence[Any], loss_fn: LossFunction | None = None) -> list[float]:
        """Losses of batches, without gradients. `model.eval()` is the caller's.

        Raises as `step` does.
        """
        self._refuse_if_over()
        given = self._setup.on_device(batches)
        loss_fn = loss_fn if loss_fn is not None else self._setup.loss_fn
        losses: list[float] = []
        size = self._running.planned.sizes.num_micro_batches if self._running is not None else 1
        for first in range(0, len(given), size):
            group = given[first : first + size]
            running = self._plan_for(group)
            with self._failing_for_good():
                self._learn_draws(running, group, loss_fn)
                self._flush(running)
                with self._evaluation(running):
                    found = running.model.evaluate(group, loss_fn)
                losses += [float(loss) for loss in found]
        return losses

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name and fp32 master, one at a time, from SSD."""
        self.synchronize()
        yield from of_one_step(self._setup.store.masters(), lambda: self.num_steps)

    def moments(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, first and second moment of every trainable parameter, one at a time."""
        self.synchronize()
        yield from of_one_step(self._setup.store.moments(), lambda: self.num_steps)

    def synchronize(self) -> None:
        """Finish the updates of all steps so far. Raises as `step` does."""
        self._refuse_if_over()
        if self._running is not None:
            with self._failing_for_good():
                self._flush(self._running)

    def seal(self, metadata: Mapping[str, Any] | None = None) -> None:
        """Make this the point a later `attach(run=...)` goes on from; crash-safe.

        Args:
            metadata: plain JSON values to find again in `sealed`.

        Raises:
            StorageError, CheckpointError: the seal before is still the one.
            ConfigError: the metadata is not plain JSON.
        """
        self.synchronize()
        self._setup.store.seal(
            step=self._counters.num_steps,
            metadata=seal_metadata(
                counters=self.counters, buffers=self.buffers, user=metadata or {}
            ),
        )

    def close(self, *, should_delete: bool = False) -> None:
        """End the run. What was sealed stays on SSD unless `should_delete`. Twice is fine."""
        if not self._life.close():
            return
        try:
            self._stop_running(should_finish=False)
        finally:
            self._setup.close(should_delete=should_delete)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A step ------------------------------------------------------------------------------------

    def _step(
        self,
        running: RunningPlan,
        batches: list[Any],
        loss_fn: LossFunction | None,
        shares: list[float],
        rates: list[GroupRates],
    ) -> StepResult:
        predicted_seconds = self._predictions.before_step(running.planned)
        started, before = time.perf_counter(), running.counters
        scale = self._counters.scale.value if self._counters.scale is not None else None
        record = self._record(rates, scale)
        tasks, number = running.rolling.step(), running.rolling.num_passes - 1
        self._load.begin(started)
        running.activations.begin(
            running.planned.plan, number, running.rolling.pools[PoolName.MOVING].capacity_bytes
        )
        self._is_settled = False
        running.lanes.submit(tasks)
        running.driver.begin(tasks, number, record)
        with self._setup.device.compute():
            found = running.model.step(
                batches,
                loss_fn,
                factors=[share * (scale or 1.0) for share in shares],
                choices=running.planned.choices,
            )
        running.driver.end()
        running.activations.end()
        # Gradients that are not finite are this step's failure, not that of a later call.
        for task in filter(looks_at_gradients, tasks):
            running.lanes.wait(task.id)
        self._counters.count(record)
        ended, traffic = time.perf_counter(), running.counters.since(before)
        planned, (ran, busy) = running.planned, self._load.end(ended)
        self._predictions.learn(ran, ended - started, planned)
        work = work_seconds(ran, planned.machine, planned.plan.system.rates)
        self._learn_machine(running)
        return StepResult.of(
            record,
            counted_losses(found, shares, scale),
            tokens=sum(num_tokens(batch) for batch in batches),
            seconds=ended - started,
            traffic=traffic,
            load=(busy, bottleneck_words(work, ended - started, planned.machine)),
            predicted_seconds=predicted_seconds,
        )

    def _record(self, rates: list[GroupRates], scale: float | None) -> StepRecord:
        return StepRecord.begin(
            self._setup.store.layout,
            groups=groups_by_name(self.model, self.optimizer),
            counters=self._counters,
            rates=rates,
            max_grad_norm=self.optimizer.max_grad_norm,
            waits_for_norm=self._setup.waits_for_norm,
            policy=self._setup.nonfinite,
            loss_scale=scale,
        )

    def _learn_draws(
        self, running: RunningPlan, batches: list[Any], loss_fn: LossFunction | None
    ) -> None:
        """Find out how many random numbers a forward draws: later micro-batches start from the
        state that earlier ones will leave."""
        unknown = running.model.unknown_batches(batches, loss_fn)
        while unknown:
            batch = unknown[0]
            self._flush(running)
            with self._evaluation(running):
                running.model.learn_draws(batch, loss_fn)
            left = running.model.unknown_batches(batches, loss_fn)
            unknown = [one for one in left if one is not batch]

    @contextlib.contextmanager
    def _evaluation(self, running: RunningPlan) -> Iterator[None]:
        """The tasks of a forward pass, around the model that runs it."""
        tasks = running.rolling.evaluation()
        running.lanes.submit(tasks)
        running.driver.begin(tasks, running.rolling.num_passes - 1, None)
        with self._setup.device.compute():
            yield
        running.driver.end()
        running.lanes.wait_all()

    def _flush(self, running: RunningPlan) -> None:
        if self._is_settled:
            return
        running.lanes.submit(running.rolling.flush())
        running.lanes.wait_all()
        self._is_settled = True

    # Plans -------------------------------------------------------------------------------------

    def _plan_for(self, batches: list[Any]) -> RunningPlan:
        sizes = sizes_of(batches)
        if self._running is not None:
            if self._running.planned.sizes.covers(sizes):
                return self._running
            sizes = self._running.planned.sizes.with_room_for(sizes)
            with self._failing_for_good():
                self._flush(self._running)
        (setup := self._setup).tell(f"planning for {sizes}")
        planned = setup.plan(setup.traced.shape(sizes, batches), sizes)
        self._predictions.plan_changes(is_same_size=False)
        self._stop_running(should_finish=True)
        if setup.residents is None:
            with self._failing_for_good():
                setup.make_residents(planned.plan)
        return self._run_plan(planned)

    def _run_plan(self, planned: PlannedRun) -> RunningPlan:
        self._running = start_running(
            self._setup, planned, recorder=self._recorder, on_finish=self._load.add
        )
        return self._running

    def _learn_machine(self, running: RunningPlan) -> None:
        """After some steps: take the plan that the rates they showed suggest if it is clearly
        faster. States that live in RAM stay there."""
        before, setup = running.planned, self._setup
        refined = self._predictions.machine_to_plan_for(before)
        if refined is None:
            return
        setup.machine = refined
        running.planned = replace(before, machine=refined)
        planned = faster_plan(setup, before)
        if planned is not None:
            self._predictions.plan_changes(is_same_size=True)
            self._flush(running)
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
            running.close(should_finish=should_finish and self._life.failure is None)

    # Failure -----------------------------------------------------------------------------------

    def _failing_for_good(self) -> contextlib.AbstractContextManager[None]:
        """A failure inside is the end: lanes stop, everything in flight is let go."""
        return self._life.working(self._fail)

    def _fail(self, error: BaseException) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.fail(error)

    def _refuse_if_over(self) -> None:
        self._life.refuse_if_over(self.run_id, self.sealed)
