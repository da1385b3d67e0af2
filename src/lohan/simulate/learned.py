"""How long tasks take in a run that is going on, learned from every step of it.

Owns the window of the last steps and their medians, so that a slow step or two change nothing. They
serve twice: replayed by the simulator, kind of task by kind of task, they predict the next step; as
rates of lanes (`refine`) they make the machine that another plan would be made for. Pure: told of
what ran, and when.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lohan.hardware.machine import Machine
from lohan.plan.system import DrivingRates
from lohan.schedule.task import Compute, Move, Task
from lohan.simulate.bottleneck import launching_is_all
from lohan.simulate.durations import Durations
from lohan.simulate.refine import (
    ObservedRate,
    busy_lanes,
    lost_seconds,
    observed_rates,
    with_rate,
)
from lohan.simulate.refine import TimedTask as TimedTask
from lohan.vocabulary import BlockId, Lane

NUM_STEPS = 5
"""In the window. Two of them may be slow for whatever reason."""

_Kind = tuple[Lane, str, BlockId | None]


def work_seconds(
    ran: Sequence[TimedTask], machine: Machine, rates: DrivingRates
) -> dict[Lane, float]:
    """How long each lane worked, less the time its link worked for others and what the system
    itself costs."""
    fixed = dict.fromkeys(Lane, 0.0)
    for task, _, _ in ran:
        fixed[task.lane] += task.fixed_seconds
    busy = busy_lanes(ran)
    return {
        lane: max(
            0.0,
            sum(end - start for start, end in own)
            - lost_seconds(lane, own, busy, machine, rates)
            - fixed[lane],
        )
        for lane, own in busy.items()
    }


class LearnedDurations(Durations):
    """Seconds of tasks as the run has shown them; of kinds it has not, by the machine's rates."""

    def __init__(
        self, machine: Machine, rates: DrivingRates, seconds_per_unit: Mapping[_Kind, float]
    ) -> None:
        super().__init__(machine, rates)
        self._seconds_per_unit = seconds_per_unit

    def of(self, task: Task) -> float:
        """Seconds of one task alone on its lane and link."""
        per_unit = self._seconds_per_unit.get(_kind(task))
        if per_unit is None:
            return super().of(task)
        return task.fixed_seconds + per_unit * _units(task)


@dataclass(frozen=True, slots=True)
class _Step:
    ran: Sequence[TimedTask]
    per_unit: Mapping[_Kind, float]
    operator_seconds: float | None
    """What launching an operator took, in a step that took so long because of that."""


class LearnedTimes:
    """What the last steps have shown."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=NUM_STEPS)

    @property
    def num_steps(self) -> int:
        """In the window."""
        return len(self._steps)

    def add(
        self,
        ran: Sequence[TimedTask],
        machine: Machine,
        rates: DrivingRates,
        launch_seconds: float = 0.0,
    ) -> None:
        """A step has ended in which these tasks ran to their end.

        `launch_seconds`: how long the GPU lane took only because the host launched its work.
        """
        work = work_seconds(ran, machine, rates)
        launches = sum(
            task.action.num_launches for task, _, _ in ran if isinstance(task.action, Compute)
        )
        is_host = launching_is_all(launch_seconds, work[Lane.GPU]) and launches
        operator_seconds = min(1.0, work[Lane.GPU] / launches) if is_host else None
        whole: dict[Lane, float] = defaultdict(float)
        seconds: dict[_Kind, float] = defaultdict(float)
        units: dict[_Kind, float] = defaultdict(float)
        for task, start, end in ran:
            took = max(0.0, end - start - task.fixed_seconds)
            whole[task.lane] += took
            seconds[_kind(task)] += took
            units[_kind(task)] += _units(task)
        share = {lane: work[lane] / took if took else 1.0 for lane, took in whole.items()}
        per_unit = {kind: share[kind[0]] * took / units[kind] for kind, took in seconds.items()}
        self._steps.append(_Step(ran, per_unit, operator_seconds))

    def clear(self) -> None:
        """Forget all steps: tasks are others from now on."""
        self._steps.clear()

    def durations(self, machine: Machine, rates: DrivingRates) -> LearnedDurations:
        """The median of every kind of task; `machine` says what no step has shown."""
        found: dict[_Kind, list[float]] = defaultdict(list)
        for step in self._steps:
            for kind, seconds in step.per_unit.items():
                found[kind].append(seconds)
        # Of two middle ones the faster: steps are slowed down by others, never sped up.
        medians = {kind: statistics.median_low(seconds) for kind, seconds in found.items()}
        return LearnedDurations(machine, rates, medians)

    def machine(self, machine: Machine, rates: DrivingRates) -> Machine:
        """The machine with the median of what its lanes reached in each step."""
        found: dict[Lane, list[ObservedRate]] = defaultdict(list)
        slow_host = [step.operator_seconds for step in self._steps if step.operator_seconds]
        if slow_host:
            machine = replace(machine, operator_seconds=statistics.median_low(slow_host))
        for step in self._steps:
            for one in observed_rates(machine, step.ran, rates):
                if one.lane is not Lane.GPU or step.operator_seconds is None:
                    found[one.lane].append(one)
        for seen in found.values():
            middle = statistics.median_high(one.observed_per_second for one in seen)
            machine = with_rate(machine, replace(seen[0], observed_per_second=middle))
        return machine


def _kind(task: Task) -> _Kind:
    # Blocks differ in how well they compute; bytes are bytes.
    is_move = isinstance(task.action, Move)
    return task.lane, task.action.kind.value, None if is_move else task.block


def _units(task: Task) -> int:
    """What a task's time is in proportion to: bytes, parameters, or nothing but its block."""
    action = task.action
    if isinstance(action, Move):
        return max(1, action.nbytes)
    return max(1, action.num_parameters) if task.lane is Lane.CPU else 1
