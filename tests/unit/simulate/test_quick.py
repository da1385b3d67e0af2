"""The short simulation is judged by the full one."""

import pytest

from lohan.hardware import machine_named
from lohan.model import shape_of
from lohan.paper import policy_named
from lohan.plan import Workload, make_plan
from lohan.plan.limits import Question
from lohan.simulate import simulate_plan
from lohan.simulate.answers.what_if import what_ifs
from lohan.simulate.choose import Judge, JudgedPlan
from lohan.simulate.quick import QUICK_STEPS, quick_step

CASES = [
    ("lohan+", "gpt-6b", "paper-4090", 8, True),
    ("lohan+", "gpt-6b", "desktop-4090", 32, False),
    ("lohan+", "gpt-13b", "desktop-4090", 8, True),
    ("lohan+", "gpt-30b", "workstation-4090", 16, True),
    ("lohan", "gpt-6b", "desktop-4090", 8, False),
    ("zero-infinity", "gpt-6b", "paper-3090", 8, False),
]


@pytest.mark.parametrize(("policy", "model", "machine_name", "batch", "clips"), CASES)
def test_short_simulations_agree_with_the_full_one(
    policy: str, model: str, machine_name: str, batch: int, clips: bool
) -> None:
    machine = machine_named(machine_name)
    workload = Workload(batch=batch, sequence=1024, clips_gradients=clips)
    plan = policy_named(policy).plan(machine, shape_of(model), workload)
    full = simulate_plan(plan, machine)
    few = simulate_plan(plan, machine, num_steps=QUICK_STEPS)
    for short in (quick_step(plan, machine), few):
        # Where updates fall behind the passes, a few steps more show a little more of it.
        assert short.step_seconds == pytest.approx(full.step_seconds, rel=0.02)
        assert short.written_bytes == full.written_bytes
        assert short.roofline_seconds == pytest.approx(full.roofline_seconds)


def test_what_ifs_come_best_first_and_those_that_do_not_fit_last() -> None:
    machine = machine_named("paper-4090")
    workload = Workload(batch=128, sequence=1024)
    question = Question(
        policy=policy_named("lohan"), machine=machine, shape=shape_of("gpt-13b"), workload=workload
    )
    judge = Judge()
    taken = judge.best(question)
    assert taken is not None
    found = what_ifs(question, taken, judge)
    factors = [one.factor or 0.0 for one in found]
    assert factors == sorted(factors, reverse=True)
    assert found[-1].option == "--batch 256"
    assert found[-1].step is None


def test_single_drive_is_doubled_once_and_clipping_is_dropped_only_where_it_is() -> None:
    machine = machine_named("desktop-4090")
    shape = shape_of("gpt-1.55b")
    for clips in (False, True):
        workload = Workload(batch=4, sequence=1024, clips_gradients=clips)
        question = Question(policy="lohan+", machine=machine, shape=shape, workload=workload)
        plan = make_plan("lohan+", machine, shape, workload)
        now = JudgedPlan(plan=plan, step=quick_step(plan, machine))
        options = [one.option for one in what_ifs(question, now, Judge())]
        assert options.count("--ssds 2") == 1
        assert ("--no-clip" in options) is clips
