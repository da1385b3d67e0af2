"""The simulator's clock against an exact one, and the cost model against the simulator."""

import statistics
from dataclasses import replace

import pytest

from lohan.hardware.machine import Machine
from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.paper import policy_named
from lohan.plan import Plan, Workload
from lohan.plan.block_costs import planned_load
from lohan.simulate import replay, settled_schedule, simulate_plan
from lohan.simulate.durations import Durations
from support.best_choices import planned_stage_seconds
from support.random_plans import random_plan
from support.slow_clock import exact_times


def with_interference(plan: Plan, share: float) -> Plan:
    rates = replace(plan.system.rates, copy_interference=share)
    return replace(plan, system=replace(plan.system, rates=rates))


@pytest.mark.parametrize("seed", range(60))
def test_the_clock_agrees_with_exact_arithmetic(seed: int) -> None:
    plan, machine = random_plan(seed, policy="lohan+" if seed % 2 else None, most_blocks=4)
    plan = with_interference(plan, (0.0, 0.22, 0.4)[seed % 3])
    path = replace(machine.ssd_path, is_duplex=seed % 4 < 2)
    gpu = replace(machine.gpu, is_processor=seed % 5 < 2)
    machine = replace(machine, ssd_path=path, gpu=gpu)
    schedule = settled_schedule(plan, machine, num_steps=2)
    times = replay(schedule, plan, machine)
    durations = Durations(machine, plan.system.rates)
    starts, ends = exact_times(
        schedule,
        durations.of,
        is_ssd_duplex=machine.ssd_path.is_duplex,
        copy_interference=plan.system.rates.copy_interference,
        shares_cores=machine.gpu.is_processor,
    )
    longest = float(max(ends.values()))
    for task in schedule.tasks:
        assert times.start_seconds[task.id] == pytest.approx(
            float(starts[task.id]), rel=1e-9, abs=1e-9 * longest
        )
        assert times.end_seconds[task.id] == pytest.approx(
            float(ends[task.id]), rel=1e-9, abs=1e-9 * longest
        )


# Cost model against simulator ----------------------------------------------------------------

# docs/cost-model.md states these bounds; change both together.
OURS_BOUNDS = (0.90, 1.10)
OURS_CLIPPED_BOUNDS = (0.85, 1.25)
PAPER_BOUNDS = (0.80, 1.30)

CASES = [
    ("llama-3.1-8b", "paper-4090", 32),
    ("gpt-13b", "paper-4090", 8),
    ("gpt-13b", "paper-4090", 32),
    ("gpt-70b", "paper-4090", 16),
    ("gpt-175b", "paper-4090", 16),
    ("llama-3.1-8b", "desktop-4090", 8),
    ("gpt-13b", "desktop-4090", 32),
    ("qwen3-14b", "workstation-4090", 16),
]


def ratios(policy: str, *, clips: bool) -> list[float]:
    found = []
    for model, name, batch in CASES:
        machine: Machine = machine_named(name)
        workload = Workload(batch=batch, sequence=1024, clips_gradients=clips)
        plan = policy_named(policy).plan(machine, shape_of(model), workload)
        estimate = (
            planned_load(plan, machine).estimated_seconds
            if policy == "lohan+"
            else planned_stage_seconds(plan, machine)
        )
        found.append(simulate_plan(plan, machine).step_seconds / estimate)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "clips", "bounds"),
    [
        ("lohan+", False, OURS_BOUNDS),
        ("lohan+", True, OURS_CLIPPED_BOUNDS),
        ("lohan", False, PAPER_BOUNDS),
    ],
)
def test_the_simulated_step_is_within_bounds_of_the_estimate(
    policy: str, clips: bool, bounds: tuple[float, float]
) -> None:
    found = ratios(policy, clips=clips)
    assert bounds[0] <= min(found), found
    assert max(found) <= bounds[1], found
    assert bounds[0] <= statistics.median(found) <= bounds[1]
