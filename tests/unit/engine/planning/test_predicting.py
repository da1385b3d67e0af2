"""When steps are predicted, and when another plan may be taken."""

import types
from typing import Any

import pytest

from lohan.engine.planning import predicting
from lohan.engine.planning.predicting import Predictions
from lohan.plan import Workload, make_plan
from support.hand_made import block, machine, model, operator


def planned() -> Any:
    shape = model(*[block(operator(0, gflop=200, mb=50), num_parameters=10**7)] * 3)
    box = machine(ram_gb=0.5)
    plan = make_plan("lohan+", box, shape, Workload(batch=2, sequence=16))
    return types.SimpleNamespace(plan=plan, machine=box)


def test_nothing_is_predicted_before_anybody_asks() -> None:
    predictions, run = Predictions(), planned()
    assert predictions.before_step(run) is None
    assert predictions.of(run).step_seconds == predictions.before_step(run)


def test_predicting_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, num_made = [0.0], [0]
    real = predicting.simulate_plan

    def simulate(*given: Any, **more: Any) -> Any:
        now[0] += 1.0
        num_made[0] += 1
        return real(*given, **more)

    monkeypatch.setattr(predicting, "simulate_plan", simulate)
    monkeypatch.setattr(predicting.time, "perf_counter", lambda: now[0])
    predictions, run = Predictions(), planned()
    predictions.of(run)
    for _ in range(10):
        predictions.learn([], 1.0, run, 0.0)
        predictions.before_step(run)
    # The first steps are predicted whatever it costs; the first one taught nothing.
    assert num_made == [10]
    for _ in range(400):
        predictions.learn([], 1.0, run, 0.0)
        predictions.before_step(run)
    assert num_made == [10]
    for _ in range(200):
        predictions.learn([], 1.0, run, 0.0)
        predictions.before_step(run)
    assert 10 < num_made[0] <= 13


def test_another_plan_is_thought_of_after_few_steps_only() -> None:
    predictions, run = Predictions(), planned()
    due = []
    for step in range(1, 600):
        predictions.learn([], 1.0, run, 0.0)
        if predictions.machine_to_plan_for(run) is not None:
            due.append(step)
    assert due == [4, 32, 256, 512]
