"""A simulated run as a trace, the same format the engine records, and its steady part as text.

The first steps fill the pipeline and the last one ends without a successor; both would mislead, so
only whole steps between them are shown. Owns which steps those are.
"""

from dataclasses import dataclass, replace

from lohan.hardware.machine import Machine
from lohan.plan.plan import Plan
from lohan.schedule.build import build_schedule
from lohan.schedule.check import check_schedule
from lohan.schedule.task import Move, Schedule
from lohan.schedule.text import dump_schedule
from lohan.simulate.clock import ClockResult
from lohan.simulate.result import SimulatedStep
from lohan.simulate.simulator import NUM_STEPS, read_off, replay, settle, settled_schedule
from lohan.trace import Counter, Span, Trace, chrome_json
from lohan.vocabulary import ComputeKind, Tier

MAX_STEPS = 8
_STEPS_AROUND = 4
"""Steps simulated around the shown ones: the pipeline fills, and it runs empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A replayed schedule and the stretch of it that is steady."""

    step: SimulatedStep
    schedule: Schedule
    trace: Trace
    first_step: int
    """The first step of the steady stretch."""
    start_seconds: float
    end_seconds: float

    def chrome(self) -> str:
        """The steady steps for Perfetto; time 0 is where the first span shown begins."""
        shown = self.steady()
        begin = min((span.start_seconds for span in shown.spans), default=0.0)
        return chrome_json(self._steady(self.start_seconds + begin))

    def steady(self) -> Trace:
        """The steady steps; time 0 is where the first of them begins."""
        return self._steady(self.start_seconds)

    @property
    def seconds(self) -> float:
        """How long the steady steps take."""
        return self.end_seconds - self.start_seconds

    def text(self) -> str:
        """The tasks of one steady step, lane by lane."""
        return dump_schedule(self.schedule, step=self.first_step)

    def _steady(self, origin_seconds: float) -> Trace:
        spans = tuple(
            replace(
                span,
                start_seconds=span.start_seconds - origin_seconds,
                end_seconds=span.end_seconds - origin_seconds,
            )
            for span in self.trace.spans
            if span.end_seconds > self.start_seconds and span.start_seconds < self.end_seconds
        )
        shown = {span.task for span in spans}
        return replace(
            self.trace,
            spans=spans,
            counters=tuple(self._cut(one, origin_seconds) for one in self.trace.counters),
            comes_after={
                task: tuple(before for before in after if before in shown)
                for task, after in self.trace.comes_after.items()
                if task in shown
            },
        )

    def _cut(self, counter: Counter, origin_seconds: float) -> Counter:
        samples = list(zip(counter.at_seconds, counter.used_bytes, strict=True))
        inside = [(at, used) for at, used in samples if self.start_seconds < at < self.end_seconds]
        # What holds at the beginning of the stretch was set before it.
        before = [used for at, used in samples if at <= self.start_seconds][-1:]
        kept = [(self.start_seconds, used) for used in before] + inside
        return replace(
            counter,
            at_seconds=tuple(at - origin_seconds for at, _ in kept),
            used_bytes=tuple(used for _, used in kept),
        )


def timeline_of(plan: Plan, machine: Machine, *, num_steps: int) -> Timeline:
    """Simulate a plan and find its steady steps.

    Raises:
        ScheduleError: if the tasks cannot run, or a check fails.
    """
    # A barrier's schedule has the steps it needs, however many are asked for.
    schedule = settled_schedule(plan, machine, num_steps=max(NUM_STEPS, num_steps + _STEPS_AROUND))
    times = replay(schedule, plan, machine)
    step = read_off(schedule, times, plan, machine)
    if plan.system.has_barrier:
        first = 1
        if num_steps > 1:
            schedule, times = settle(
                build_schedule(plan, num_steps=num_steps + 1), machine, plan.system.rates
            )
            check_schedule(schedule, plan)
        ends = _ends(schedule, times)
    else:
        first = schedule.num_steps - 1 - num_steps
        # The last gradient: where one step's GPU work gives way to the next.
        ends = _ends(schedule, times, ComputeKind.BACKWARD)
    return Timeline(
        step=step,
        schedule=schedule,
        trace=trace_of(schedule, times, plan, machine),
        first_step=first,
        start_seconds=ends[first - 1],
        end_seconds=ends[first + num_steps - 1],
    )


def _ends(
    schedule: Schedule, times: ClockResult, kind: ComputeKind | None = None
) -> dict[int, float]:
    """When everything of each step, or all computing of a kind, has ended."""
    ends: dict[int, float] = {}
    for task in schedule.tasks:
        if kind is None or task.action.kind is kind:
            ends[task.step] = max(ends.get(task.step, 0.0), times.end_seconds[task.id])
    return ends


def trace_of(schedule: Schedule, times: ClockResult, plan: Plan, machine: Machine) -> Trace:
    """Spans of every task and memory in use per tier."""
    spans = (
        Span(
            lane=task.lane,
            name=task.name,
            start_seconds=times.start_seconds[task.id],
            end_seconds=times.end_seconds[task.id],
            kind=task.action.kind.value,
            task=task.id,
            block=task.block,
            nbytes=task.action.nbytes if isinstance(task.action, Move) else None,
            step=task.step,
        )
        for task in schedule.tasks
    )
    return Trace(
        name=f"{plan.policy} {plan.shape.name} on {machine.name}",
        is_simulated=True,
        spans=tuple(sorted(spans, key=lambda span: (span.start_seconds, span.end_seconds))),
        counters=_counters(schedule, times, plan),
        comes_after={task.id: task.after for task in schedule.tasks if task.after},
        metadata={
            "policy": plan.policy,
            "model": plan.shape.name,
            "machine": machine.name,
            "batch": str(plan.workload.batch),
            "sequence": str(plan.workload.sequence),
        },
    )


def _counters(schedule: Schedule, times: ClockResult, plan: Plan) -> tuple[Counter, ...]:
    in_use = dict.fromkeys(schedule.pools, 0)
    totals = {tier: schedule.initial.get(tier, 0) for tier in (Tier.GPU, Tier.RAM)}
    samples: dict[Tier, tuple[list[float], list[int]]] = {tier: ([], []) for tier in totals}
    for now, pool, nbytes in times.usage:
        tier = schedule.pools[pool].tier
        totals[tier] += nbytes - in_use[pool]
        in_use[pool] = nbytes
        at, used = samples[tier]
        if at and at[-1] == now:
            used[-1] = totals[tier]
        else:
            at.append(now)
            used.append(totals[tier])
    return tuple(
        Counter(
            tier=tier,
            at_seconds=tuple(at),
            used_bytes=tuple(used),
            budget_bytes=plan.ledger.budgets.get(tier),
        )
        for tier, (at, used) in samples.items()
    )
