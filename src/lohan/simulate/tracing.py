"""A replayed schedule as a Trace: the same format the engine records, with virtual seconds."""

from lohan.hardware.machine import Machine
from lohan.plan.plan import Plan
from lohan.schedule.task import Move, Schedule
from lohan.simulate.clock import ClockResult
from lohan.trace import Counter, Span, Trace
from lohan.vocabulary import Tier


def trace_of(schedule: Schedule, times: ClockResult, plan: Plan, machine: Machine) -> Trace:
    """Spans of every task and memory in use per tier."""
    spans = []
    for task in schedule.tasks:
        spans.append(
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
