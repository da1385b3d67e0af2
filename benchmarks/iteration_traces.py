"""The same steps of a run and of its simulation, cut out, aligned and put above each other.

Owns which steps are shown and where zero is. Used by `iteration.py`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lohan.hardware.machine import Machine
from lohan.plan.plan import Plan
from lohan.simulate.simulator import replay, settled_schedule
from lohan.simulate.timeline import trace_of
from lohan.trace import Span, Trace, chrome_json
from lohan.vocabulary import ComputeKind, Lane

NUM_SHOWN_STEPS = 2
_NUM_SIMULATED_STEPS = 6


def simulated_trace(plan: Plan, machine: Machine) -> Trace:
    """Several steps of a plan on the virtual clock."""
    schedule = settled_schedule(plan, machine, num_steps=_NUM_SIMULATED_STEPS)
    return trace_of(schedule, replay(schedule, plan, machine), plan, machine)


def steps_of(trace: Trace) -> list[int]:
    """Steps of which everything is there, updates included: a later step went forward."""
    steps = sorted({span.step for span in trace.spans if span.step is not None})
    return steps[:-1]


def cut(trace: Trace, steps: Sequence[int]) -> Trace:
    """Some steps of a trace, counted from 0, with zero where the first of them goes forward."""
    chosen = [span for span in trace.spans if span.step in steps]
    begin = min(
        span.start_seconds
        for span in chosen
        if span.step == steps[0]
        and span.lane is Lane.GPU
        and span.kind == ComputeKind.FORWARD.value
    )
    numbers = {step: number for number, step in enumerate(steps)}
    return replace(
        trace,
        spans=tuple(_moved(span, begin, numbers) for span in chosen),
        counters=(),
        comes_after={},
    )


def _moved(span: Span, begin: float, numbers: dict[int, int]) -> Span:
    assert span.step is not None
    return replace(
        span,
        start_seconds=span.start_seconds - begin,
        end_seconds=span.end_seconds - begin,
        step=numbers[span.step],
    )


def side_by_side(measured: Trace, plan: Plan, machine: Machine) -> str:
    """A Chrome trace of the last whole steps, measured above simulated."""
    simulated = simulated_trace(plan, machine)
    pair = [cut(one, steps_of(one)[-NUM_SHOWN_STEPS:]) for one in (measured, simulated)]
    return chrome_json(*pair)


def task_names(trace: Trace, step: int) -> Counter[tuple[str, str]]:
    """Lane and name of every task of a step, with how often it is there."""
    return Counter((str(span.lane), span.name) for span in trace.spans if span.step == step)
