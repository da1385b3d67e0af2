"""Lanes really work at the same time: as much of a step is hidden as its schedule says.

The device, the drives and the updates are emulated at set rates, which are far below those of any
machine: each task lasts at least as long as the simulator says, asleep, whatever else runs here.
So lanes that run one after another hide nothing at all, and there is no clock to be right about.
"""

import importlib
import pathlib
from typing import Any

import pytest

from lohan.schedule import Task
from lohan.schedule.ready import Ready
from lohan.simulate.simulator import replay, settled_schedule
from lohan.simulate.timeline import trace_of
from lohan.trace import Trace
from lohan.trace.rows import merged, rows_of
from lohan.vocabulary import Lane

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
NUM_STEPS = 2
TIME_SCALE = 0.005
"""A step takes about a third of a second."""


@pytest.fixture
def bench(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    iteration = importlib.import_module("iteration")
    return iteration.Bench(
        iteration.SmallModel(num_layers=6),
        time_scale=TIME_SCALE,
        num_ssds=12,
        directory=str(tmp_path),
    )


def measured_and_simulated(bench: Any) -> tuple[Trace, Trace]:
    iteration = importlib.import_module("iteration")
    row = bench.run(iteration.System(policy="lohan+"), NUM_STEPS)
    schedule = settled_schedule(row.plan, row.machine, num_steps=4)
    replayed = replay(schedule, row.plan, row.machine)
    return row.measured, trace_of(schedule, replayed, row.plan, row.machine)


def hidden_seconds(trace: Trace) -> float:
    """Of a step on average: seconds that lanes are busy while another one is busy too."""
    busy = [interval for row in rows_of(trace) for interval in row.busy]
    any_busy = merged(sorted(busy))
    busy_seconds, any_seconds = (
        sum(end - start for start, end in intervals) for intervals in (busy, any_busy)
    )
    return (busy_seconds - any_seconds) / len({span.step for span in trace.spans})


def judge(measured: Trace, simulated: Trace) -> None:
    """At least half of what the simulator hides is hidden."""
    hidden, expected = hidden_seconds(measured), hidden_seconds(simulated)
    assert expected > 0.1, expected
    assert hidden > expected / 2, f"{hidden} s are hidden, {expected} s should be"


def run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No task starts on any lane while another runs."""
    running: set[int] = set()

    class OneAtATime(Ready):
        def next_of(self, lane: Lane) -> Task | None:
            return None if running else super().next_of(lane)

        def may_run(self, task: Task) -> bool:
            return not running and super().may_run(task)

        def start(self, task: Task) -> None:
            running.add(task.id)
            super().start(task)

        def finish(self, task: Task) -> list[Task]:
            running.remove(task.id)
            return super().finish(task)

    monkeypatch.setattr("lohan.lanes.executor.Ready", OneAtATime)


def test_lanes_hide_what_the_simulator_says_they_hide(bench: Any) -> None:
    judge(*measured_and_simulated(bench))


def test_lanes_that_run_one_after_another_are_found_out(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_one_at_a_time(monkeypatch)
    measured, simulated = measured_and_simulated(bench)
    assert hidden_seconds(measured) == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(AssertionError, match=r"^0\.0 s are hidden"):
        judge(measured, simulated)
