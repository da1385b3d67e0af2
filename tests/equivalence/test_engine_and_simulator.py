"""One schedule, two executors: the engine's lanes hold the tasks the simulator ran, and no others.

Tasks are counted and compared, times are not: how long they take on an emulated machine next to the
prediction is what `benchmarks/iteration.py` measures.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lohan.paper import policy_named
from lohan.plan.plan import Plan
from lohan.plan.policies import Policy, SystemPolicy
from lohan.simulate.simulator import replay, settled_schedule
from lohan.simulate.timeline import trace_of
from lohan.trace import Trace
from lohan.vocabulary import Choice, Lane
from support.engine_runs import EngineCase, attach, batches_of, build, forced, optimizer_for
from support.small_machines import small_machine

NUM_STEPS = 4


def planned_once(name: str) -> Policy:
    """A policy whose first plan stays: engines take another plan for those they know by name when
    the second step shows that this machine is faster or slower than it was said to be."""
    return lambda machine, shape, workload: policy_named(name).plan(machine, shape, workload)


CASES = [
    EngineCase(max_grad_norm=None),
    EngineCase(),
    EngineCase(residents=False, num_parts=3),
    EngineCase(residents=False, num_parts=2, max_grad_norm=None, choice=Choice.SWAP_TO_SSD),
    EngineCase(residents=False, spills=True, choice=Choice.SWAP_TO_RAM),
    EngineCase(choice=Choice.RECOMPUTE, num_micro_batches=2),
    EngineCase(policy="lohan", max_grad_norm=None),
    EngineCase(policy="zero-infinity", max_grad_norm=None),
    EngineCase(model="gpt2"),
    EngineCase(model="lora", residents=False, max_grad_norm=None),
]


def tasks_of(trace: Trace, step: int) -> Counter[tuple[Lane, str, int | None]]:
    """Lane, name and bytes of every task of a step."""
    return Counter((span.lane, span.name, span.nbytes) for span in trace.spans if span.step == step)


def assert_one_at_a_time(trace: Trace) -> None:
    for lane in Lane:
        spans = [span for span in trace.spans if span.lane is lane]
        spans.sort(key=lambda span: (span.start_seconds, span.end_seconds))
        for before, after in pairwise(spans):
            assert before.end_seconds <= after.start_seconds, (before, after)


def simulated(plan: Plan) -> Trace:
    machine = small_machine()
    schedule = settled_schedule(plan, machine, num_steps=NUM_STEPS)
    return trace_of(schedule, replay(schedule, plan, machine), plan, machine)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_and_its_simulation_hold_the_same_tasks_one_at_a_time(
    case: EngineCase, tmp_path: Path
) -> None:
    case = replace(case, num_steps=NUM_STEPS, device="emulated")
    if isinstance(forced(case), SystemPolicy):
        case = replace(case, policy=planned_once(str(case.policy)))
    model = build(case)
    with attach(case, model, optimizer_for(case, model), tmp_path, is_tracing=True) as engine:
        for batches in batches_of(case):
            engine.step(batches)
        engine.synchronize()
        plan, measured = engine.plan, engine.trace()
        engine.close(should_delete=True)
    assert plan is not None
    predicted = simulated(plan)
    # A step in the middle: the first has no updates before it, after the last none are put off.
    of_run = {span.step for span in measured.spans if span.step is not None}
    middle = sorted(of_run)[-3]
    step_of_simulation = 0 if plan.system.has_barrier else 1
    assert tasks_of(measured, middle) == tasks_of(predicted, step_of_simulation)
    assert_one_at_a_time(measured)


@pytest.mark.parametrize("policy", ["lohan+", "lohan", "zero-infinity"])
def test_states_have_the_bytes_per_parameter_of_the_policys_system(
    policy: str, tmp_path: Path
) -> None:
    case = EngineCase(policy=policy, num_steps=1)
    model = build(case)
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        engine.step(batches_of(case)[0])
        assert engine.plan is not None
        stored = sum(part.bytes_per_parameter for part in engine.store.layout.block(1).parts)
        assert engine.plan.system.state == policy_named(policy).system.state
        assert engine.plan.system.state.stored_bytes == stored
        engine.close(should_delete=True)
