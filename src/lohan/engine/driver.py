"""Drives the tasks of the gpu lane while the model runs, and carries out those of all others.

Owns the meeting point of schedule and model: which task stands for which visit of a segment, and
which action each other task is. Contains no policy. The main thread calls the hooks; lane threads
call `action`.
"""

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from lohan.device.device import Device
from lohan.drive import Phase, SegmentGradients
from lohan.engine.planning.plan_memory import area_slack_bytes
from lohan.engine.planning.plan_run import PlannedRun
from lohan.errors import ScheduleError, bug
from lohan.lanes.activation_moves import AREA_POOLS, SwappedActivations
from lohan.lanes.executor import LaneExecutor
from lohan.lanes.gradient_moves import GradientMoves
from lohan.lanes.step_record import StepRecord
from lohan.lanes.updates import Updates
from lohan.lanes.weight_moves import Fetch, WeightMoves
from lohan.schedule.task import Compute, Move, Task
from lohan.vocabulary import BlockId, ComputeKind, Lane, Pass, PoolName, TensorKind, Tier

THREADED_LANES = (
    Lane.SSD_READ,
    Lane.SSD_WRITE,
    Lane.RAM_TO_GPU,
    Lane.GPU_TO_RAM,
    Lane.CPU,
)


class StepDriver:
    """Implements `SegmentHooks` for steps and evaluations, and the actions of lanes."""

    def __init__(
        self,
        *,
        planned: PlannedRun,
        device: Device,
        weights: WeightMoves,
        gradients: GradientMoves,
        activations: SwappedActivations,
        updates: Updates,
        names: Mapping[BlockId, str],
        update_parameters_per_second: float | None = None,
    ) -> None:
        """With a rate, updates take at least as long as they would at it: emulated machines."""
        self._planned, self._device, self._names = planned, device, names
        self._weights, self._gradients = weights, gradients
        self._activations, self._updates = activations, updates
        self._records: dict[int, StepRecord] = {}
        self._tasks: deque[Task] = deque()
        self._visit: contextlib.ExitStack | None = None
        self._current: Task | None = None
        self._update_rate = update_parameters_per_second
        self._passed: dict[BlockId, Task] = {}
        self.lanes: LaneExecutor | None = None

    # Lanes -------------------------------------------------------------------------------------

    def action(self, task: Task) -> None:
        """Carry out one task of a lane with a thread."""
        if isinstance(task.action, Compute):
            self._compute(task, task.action)
        else:
            self._move(task, task.action)

    def _compute(self, task: Task, compute: Compute) -> None:
        record = self._records[task.step]
        if compute.kind is ComputeKind.UPDATE:
            started = time.monotonic()
            self._updates.compute(task, record)
            if self._update_rate is not None:
                due = started + compute.num_parameters / self._update_rate
                time.sleep(max(0.0, due - time.monotonic()))
        elif compute.kind is ComputeKind.NORM:
            self._gradients.gather_squares(record)
            record.finish_norm(self._names)
        elif compute.kind is ComputeKind.REDUCE:
            self._gradients.reduce(task, record)
        else:
            raise _unknown(task)

    def _move(self, task: Task, move: Move) -> None:
        way = (move.kind, move.source, move.target)
        if task.lane is Lane.PEER:
            of_weights = move.kind is TensorKind.P16
            (self._weights.gather if of_weights else self._gradients.exchange)(task)
        elif move.kind is TensorKind.P16:
            (self._weights.read if move.source is Tier.SSD else self._weights.copy)(task)
        elif move.kind is TensorKind.OS32:
            (self._updates.read if move.source is Tier.SSD else self._updates.write)(task)
        elif way == (TensorKind.G16, Tier.GPU, Tier.RAM):
            self._gradients.leave(task, self._records[task.step])
        elif way == (TensorKind.G16, Tier.RAM, Tier.SSD):
            self._gradients.spill(task)
        elif way == (TensorKind.A16, Tier.GPU, Tier.RAM):
            self._activations.copied_out(task)
        elif way == (TensorKind.A16, Tier.RAM, Tier.SSD):
            self._activations.write(task)
        elif way == (TensorKind.A16, Tier.SSD, Tier.RAM):
            self._activations.read(task)
        elif way == (TensorKind.A16, Tier.RAM, Tier.GPU):
            is_alone = self._planned.plan.num_micro_batches == 1
            self._activations.copy_back(task, is_alone=is_alone)
        else:
            raise _unknown(task)

    # The main thread ---------------------------------------------------------------------------

    def begin(self, tasks: Sequence[Task], step: int, record: StepRecord | None) -> None:
        """A pass begins whose tasks have been submitted."""
        assert not self._tasks, "the pass before has not ended"
        if record is not None:
            self._records[step] = record
            # Updates of a step end before the backward pass of the next one does.
            for old in [number for number in self._records if number < step - 2]:
                del self._records[old]
        self._passed.clear()
        self._tasks.extend(task for task in tasks if task.lane is Lane.GPU)

    def end(self) -> None:
        """The model is done: what no segment was visited for ends too."""
        while self._tasks:
            self._pass_over(self._tasks[0])

    def abandon(self) -> None:
        """After a failure: forget the pass."""
        self._tasks.clear()
        self._visit, self._current = None, None

    def updated_so_far(self) -> str:
        """Which blocks the last step has updated; after lanes have ended."""
        return self._records[max(self._records)].updated_so_far(self._names)

    def before(self, segment: BlockId, phase: Phase) -> None:
        """Bring a segment's weights: wait for the tasks in front of its work."""
        kind = ComputeKind.FORWARD if phase is Phase.FORWARD else ComputeKind.BACKWARD
        self._catch_up(kind, segment)
        task = self._enter_next()
        if phase is Phase.FORWARD:
            self._open_areas(task)
        fetch = _fetch(task, phase)
        if phase is not Phase.BACKWARD or self._weights.is_in_flight(fetch):
            self._weights.bind(fetch)

    def after(self, segment: BlockId, phase: Phase, gradients: SegmentGradients | None) -> None:
        """A segment has run: its weights may go, its gradients leave."""
        self.recomputed(segment)
        task, visit = self._current, self._visit
        assert task is not None
        assert visit is not None
        self._charge(task)
        self._weights.release(_fetch(task, phase))
        if phase is not Phase.FORWARD:
            self._activations.close_areas(segment)
            if gradients is not None:
                self._gradients.complete(self._records[task.step], task.step, gradients)
        self._visit = self._current = None
        visit.close()

    def recomputed(self, segment: BlockId) -> None:
        """The re-run of a block is a task of its own: its backward, which needs room for
        gradients, begins here. Does nothing if it has begun, or was not recomputed at all."""
        task, visit = self._current, self._visit
        if task is None or visit is None or _kind(task) is not ComputeKind.RECOMPUTE:
            return
        self._charge(task)
        visit.close()
        self._enter_next()

    def gradient_buffer(self, segment: BlockId, num_bytes: int) -> torch.Tensor:
        """Memory for a segment's gradients, as its task has leased it."""
        self.recomputed(segment)
        task = self._current
        assert task is not None
        lease = next(one for one in task.leases if one.pool is PoolName.GRADIENTS)
        return self._gradients.buffer(segment, task.step, lease, num_bytes)

    def _enter_next(self) -> Task:
        """Wait until the next task of the pass may run, and begin it."""
        task = self._tasks.popleft()
        assert self.lanes is not None
        self._visit, self._current = contextlib.ExitStack(), task
        self._visit.enter_context(self.lanes.drive(task))
        # The device's clock of compute goes on from here: it has waited, not worked.
        with self._device.compute():
            pass
        return task

    def _catch_up(self, kind: ComputeKind, block: BlockId) -> None:
        """Pass over tasks whose segments are not visited: the head's forward is part of its turn,
        and a frozen beginning has no backward at all. A backward visit begins with its re-run."""
        wanted = {kind, ComputeKind.RECOMPUTE} if kind is ComputeKind.BACKWARD else {kind}
        while self._tasks:
            first = self._tasks[0]
            if first.block == block and _kind(first) in wanted:
                break
            self._pass_over(first)
        if not self._tasks:
            raise bug(
                f"the model visits {self._names[block]} for {kind}, which the schedule has passed"
            )

    def _pass_over(self, task: Task) -> None:
        assert self.lanes is not None
        self._tasks.popleft()
        if _kind(task) is ComputeKind.FORWARD:
            self._passed[task.block] = task
        with self.lanes.drive(task):
            if _kind(task) is ComputeKind.BACKWARD:
                self._weights.release(_fetch(task, Phase.BACKWARD))
                self._activations.close_areas(task.block)

    def _open_areas(self, task: Task) -> None:
        plan = self._planned.plan
        slack = area_slack_bytes(plan.blocks[task.block], plan.num_micro_batches)
        for lease in task.leases:
            if lease.pool in AREA_POOLS:
                self._activations.open_area(task.block, lease, slack)

    def _charge(self, task: Task) -> None:
        """Say what was computed, for devices that emulate a speed. Those that compute inside the
        call wait until it is; for others the lanes do, behind the back of this thread."""
        # The forward of the turn was part of this visit.
        passed = self._passed.pop(task.block, None)
        for one in (task, passed) if passed is not None else (task,):
            self._device.charge(num_flops=_compute(one).flops, fixed_seconds=one.fixed_seconds)
        if self._device.queue is None:
            self._device.wait(self._device.record())


def _compute(task: Task) -> Compute:
    assert isinstance(task.action, Compute)
    return task.action


def _fetch(task: Task, phase: Phase) -> Fetch:
    """The weights a visit computes with: the turn's are those of its forward pass."""
    of_pass = Pass.BACKWARD if phase is Phase.BACKWARD else Pass.FORWARD
    return Fetch(task.block, of_pass, task.step)


def _kind(task: Task) -> ComputeKind:
    return _compute(task).kind


def _unknown(task: Task) -> ScheduleError:
    return ScheduleError(
        f"the engine does not know how to carry out {task.name} on {task.lane}",
        why="no action belongs to it",
        remedy="use a policy whose states live on SSD or in RAM and are updated on the CPU",
    )
