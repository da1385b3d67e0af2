"""One optimizer step, told from top to bottom. The page to read first.

A step is a list of tasks on lanes (`schedule`), the one the simulator runs on a virtual clock. Here
it runs for real:

- The main thread runs the user's own model, block by block (`drive`). That is the `gpu` lane.
- Every other lane is a thread that takes the most urgent task that may run (`schedule.ready`,
  `lanes.executor`): weights come in, activations go out and back, gradients leave, states are read,
  updated and written.
- They meet at the edges of a block (`driver`): before it computes, the main thread waits for its
  task and binds the weights that have come; after it, weights go and gradients are handed on.

Nothing is decided here: the plan has. Called by the engine, on the main thread.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lohan.device.device import Device
from lohan.drive import LossFunction
from lohan.engine.loss import counted_losses, num_tokens
from lohan.engine.planning.predicting import Predictions
from lohan.engine.ranks import DealtStep, buffers_unchanged
from lohan.engine.results import RunCounters, StepResult
from lohan.engine.run_setup import RunSetup
from lohan.engine.running import RunningPlan
from lohan.lanes.lane_load import LaneLoad
from lohan.lanes.step_record import StepRecord, groups_by_name, looks_at_gradients
from lohan.optimizer import AdamWSettings
from lohan.optimizer.torch_optimizer import AdamW
from lohan.parallel.peers import in_turn
from lohan.simulate.bottleneck import bottleneck_words
from lohan.simulate.durations import Durations
from lohan.simulate.learned import work_seconds
from lohan.vocabulary import PoolName

_SWITCH_SECONDS = 0.0005
"""A tenth of Python's own; a lane thread holds its lock for far less, most of the time."""


@dataclass(slots=True, kw_only=True)
class Books:
    """What is counted and learned from step to step."""

    counters: RunCounters
    load: LaneLoad = field(default_factory=LaneLoad)
    predictions: Predictions = field(default_factory=Predictions)


def take_step(
    setup: RunSetup,
    running: RunningPlan,
    books: Books,
    record: StepRecord,
    batches: list[Any],
    dealt: DealtStep,
    loss_fn: LossFunction | None,
) -> StepResult:
    """Run one step, and tell what it did and how long it took."""
    predicted_seconds = books.predictions.before_step(running.planned)
    started, traffic_before = time.perf_counter(), running.counters
    books.load.begin(started)

    with _prompt_launches(setup.device):
        losses = _run(setup, running, record, batches, dealt, loss_fn)
    everybody = setup.peers.share(
        (
            dealt.as_given(counted_losses(losses, dealt.shares, record.loss_scale)),
            sum(num_tokens(batch) for batch in batches),
        ),
        what="the losses of a step",
    )

    for sentence in setup.captures.news():
        setup.options.tell(sentence)
    books.counters.count(record)
    ended, planned = time.perf_counter(), running.planned
    seconds = ended - started
    ran, busy = books.load.end(ended)
    machine, rates = planned.machine, planned.plan.system.rates
    # A device with a queue shows when it waited for the host; others are told by the plan.
    launching = books.load.starved_seconds
    if setup.device.queue is None:
        launching = sum(Durations(machine, rates).launching(task) for task, _, _ in ran)
    books.predictions.learn(ran, seconds, planned, launching)
    work = work_seconds(ran, machine, rates)
    return StepResult.of(
        record,
        tuple(in_turn([own for own, _ in everybody])),
        tokens=sum(count for _, count in everybody),
        seconds=seconds,
        traffic=running.counters.since(traffic_before),
        load=(busy, bottleneck_words(work, seconds, machine, launching)),
        predicted_seconds=predicted_seconds,
    )


@contextlib.contextmanager
def _prompt_launches(device: Device) -> Iterator[None]:
    """Where the host launches ahead of the device, other threads give Python's lock up sooner: the
    launching thread waits for it while the device may run out of work."""
    before = sys.getswitchinterval()
    if device.queue is not None:
        sys.setswitchinterval(min(before, _SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _run(
    setup: RunSetup,
    running: RunningPlan,
    record: StepRecord,
    batches: list[Any],
    dealt: DealtStep,
    loss_fn: LossFunction | None,
) -> list[torch.Tensor]:
    # The tasks of one more step. Updates that the step before put off come first, in front of the
    # forward pass of the block they belong to.
    tasks, number = running.rolling.step(), running.rolling.num_passes - 1
    running.has_updates_due = True
    running.activations.begin(
        running.planned.plan, number, running.rolling.pools[PoolName.MOVING].capacity_bytes
    )
    # Lanes get all tasks at once and begin: reading the first weights needs nobody's word.
    running.lanes.submit(tasks)
    running.driver.begin(tasks, number, record)
    # The model's own forward, then backward, all micro-batches through a block before the next.
    # A rank whose groups have none only meets the others.
    losses = []
    if batches:
        with setup.device.compute(), buffers_unchanged(setup):
            losses = running.model.step(
                batches,
                loss_fn,
                factors=[share * (record.loss_scale or 1.0) for share in dealt.shares],
                choices=running.planned.choices,
                groups=dealt.groups,
            )
    running.driver.end()
    running.activations.end()
    # Gradients that are not finite are this step's failure, not that of a later call. Updates and
    # writes go on: under the next step, until somebody asks for the states.
    for task in filter(looks_at_gradients, tasks):
        running.lanes.wait(task.id)
    return losses


@contextlib.contextmanager
def forward_only(setup: RunSetup, running: RunningPlan) -> Iterator[None]:
    """The tasks of a forward pass, around the model that runs it."""
    tasks = running.rolling.evaluation()
    running.lanes.submit(tasks)
    running.driver.begin(tasks, running.rolling.num_passes - 1, None)
    with setup.device.compute():
        yield
    running.driver.end()
    running.lanes.wait_all()


def finish_updates(running: RunningPlan) -> None:
    """Run the updates that were put off: the states are then those of the last step."""
    if running.has_updates_due:
        running.lanes.submit(running.rolling.flush())
        running.lanes.wait_all()
        running.has_updates_due = False


def learn_draws(
    setup: RunSetup, running: RunningPlan, batches: list[Any], loss_fn: LossFunction | None
) -> None:
    """Find out how many random numbers a forward draws: later micro-batches start from the state
    that earlier ones will leave."""
    unknown = running.model.unknown_batches(batches, loss_fn)
    while any(setup.peers.share(bool(unknown), what="whether random numbers must be counted")):
        batch = unknown[0] if unknown else None
        finish_updates(running)
        with forward_only(setup, running):
            # Where another rank has to, this one goes along.
            if batches:
                running.model.learn_draws(batches[0] if batch is None else batch, loss_fn)
        left = running.model.unknown_batches(batches, loss_fn)
        unknown = [one for one in left if one is not batch]


def begin_record(
    setup: RunSetup, counters: RunCounters, optimizer: AdamW, rates: list[AdamWSettings]
) -> StepRecord:
    """What the next step needs to know: the rates of every tensor, the clip, the loss scale."""
    return StepRecord.begin(
        setup.store.layout,
        setup.layout,
        groups=groups_by_name(setup.model, optimizer),
        counters=counters,
        rates=rates,
        max_grad_norm=optimizer.max_grad_norm,
        waits_for_norm=setup.waits_for_norm,
        policy=setup.nonfinite,
        loss_scale=counters.scale.value if counters.scale is not None else None,
    )
