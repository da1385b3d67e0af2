"""Times learned from steps: replayed, they say what the machine really does, slow steps or not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lohan.hardware.machine import Machine
from lohan.paper import policy_named
from lohan.plan import Workload, make_plan
from lohan.plan.plan import Plan
from lohan.simulate import replay, settled_schedule, simulate_plan
from lohan.simulate.bottleneck import bottleneck_words, without_shares
from lohan.simulate.learned import LearnedTimes, TimedTask, work_seconds
from lohan.vocabulary import Lane
from support.hand_made import block, machine, model, operator

SHAPE = model(
    *[block(operator(0, gflop=200, mb=50), operator(1, gflop=100, mb=50), num_parameters=10**7)] * 6
)


def slower(box: Machine, factor: float) -> Machine:
    """The same box with every rate so much lower."""
    drive = replace(
        box.ssds[0],
        read_bytes_per_second=box.ssds[0].read_bytes_per_second / factor,
        write_bytes_per_second=box.ssds[0].write_bytes_per_second / factor,
    )
    path = replace(
        box.ssd_path,
        read_ceiling_bytes_per_second=box.ssd_path.read_ceiling_bytes_per_second / factor,
        write_ceiling_bytes_per_second=box.ssd_path.write_ceiling_bytes_per_second / factor,
    )
    gpu = replace(
        box.gpu,
        flops_per_second=box.gpu.flops_per_second / factor,
        memory_bytes_per_second=box.gpu.memory_bytes_per_second / factor,
    )
    return replace(
        box,
        gpu=gpu,
        ram_to_gpu_bytes_per_second=box.ram_to_gpu_bytes_per_second / factor,
        gpu_to_ram_bytes_per_second=box.gpu_to_ram_bytes_per_second / factor,
        cpu_update_parameters_per_second=box.cpu_update_parameters_per_second / factor,
        ssds=(drive,),
        ssd_path=path,
    )


def step_on(plan: Plan, real: Machine) -> list[TimedTask]:
    """What ran in one of several steps on a machine, on the virtual clock."""
    schedule = settled_schedule(plan, real)
    times = replay(schedule, plan, real)
    number = max(0, schedule.num_steps - 2)
    return [
        (task, times.start_seconds[task.id], times.end_seconds[task.id])
        for task in schedule.tasks
        if task.step == number
    ]


def predicted(plan: Plan, guess: Machine, steps: Sequence[Sequence[TimedTask]]) -> float:
    learned = LearnedTimes()
    for ran in steps:
        learned.add(ran, guess, plan.system.rates)
    durations = learned.durations(guess, plan.system.rates)
    return simulate_plan(plan, guess, durations=durations).step_seconds


@pytest.mark.parametrize("is_duplex", [False, True])
@pytest.mark.parametrize("policy", ["lohan", "lohan+", "zero-infinity"])
def test_a_machine_that_was_misjudged_is_predicted_right_after_one_step(
    policy: str, is_duplex: bool
) -> None:
    guess = machine(ram_gb=0.5, is_duplex=is_duplex)
    plan = policy_named(policy).plan(guess, SHAPE, Workload(batch=2, sequence=16))
    real = slower(guess, 3.0)
    true = simulate_plan(plan, real).step_seconds
    assert simulate_plan(plan, guess).step_seconds < 0.5 * true
    # Which task shared its link for how long is known of a lane, not of each task.
    assert predicted(plan, guess, [step_on(plan, real)]) == pytest.approx(true, rel=0.05)


def test_one_slow_step_changes_nothing_and_slow_steps_that_stay_are_believed() -> None:
    guess = machine(ram_gb=0.5)
    plan = make_plan("lohan+", guess, SHAPE, Workload(batch=2, sequence=16))
    usual, slow = step_on(plan, slower(guess, 2.0)), step_on(plan, slower(guess, 8.0))
    alone = predicted(plan, guess, [usual])
    assert predicted(plan, guess, [slow, usual]) == pytest.approx(alone)
    assert predicted(plan, guess, [usual, slow, usual]) == pytest.approx(alone)
    assert predicted(plan, guess, [usual, usual, slow, usual, slow]) == pytest.approx(alone)
    # Only the last steps count.
    assert predicted(plan, guess, [usual] * 9 + [slow] * 3) == pytest.approx(
        predicted(plan, guess, [slow])
    )


def test_the_machine_to_plan_for_has_the_median_rates_and_drives_may_be_faster() -> None:
    guess = machine(ram_gb=0.5)
    plan = policy_named("lohan").plan(guess, SHAPE, Workload(batch=2, sequence=16))
    learned = LearnedTimes()
    for factor in (0.5, 9.0, 0.5):
        learned.add(step_on(plan, slower(guess, factor)), guess, plan.system.rates)
    found = learned.machine(guess, plan.system.rates)
    assert found.ssd_write_bytes_per_second == pytest.approx(
        2 * guess.ssd_write_bytes_per_second, rel=0.01
    )
    assert found.cpu_update_parameters_per_second == pytest.approx(
        2 * guess.cpu_update_parameters_per_second, rel=0.01
    )
    learned.clear()
    assert learned.machine(guess, plan.system.rates) == guess


def test_a_slow_host_is_learned_as_such_and_not_as_a_slow_gpu() -> None:
    guess = machine(ram_gb=0.5)
    real = replace(guess, operator_seconds=0.5)
    plan = make_plan("lohan+", real, SHAPE, Workload(batch=2, sequence=16))
    rates, ran = plan.system.rates, step_on(plan, real)
    learned = LearnedTimes()
    learned.add(ran, guess, rates, launch_seconds=work_seconds(ran, guess, rates)[Lane.GPU])
    found = learned.machine(guess, rates)
    assert found.operator_seconds == pytest.approx(0.5, rel=0.01)
    assert found.gpu == guess.gpu
    # Without the device's word it counts as the GPU's rate: predictions are right either way.
    learned.clear()
    learned.add(ran, guess, rates)
    assert learned.machine(guess, rates).gpu.flops_per_second < guess.gpu.flops_per_second


@pytest.mark.parametrize("is_processor", [False, True])
@pytest.mark.parametrize("policy", ["lohan", "lohan+"])
def test_a_bottleneck_is_the_same_of_a_simulated_and_of_a_measured_step(
    policy: str, is_processor: bool
) -> None:
    box = machine(ram_gb=0.5)
    box = replace(box, gpu=replace(box.gpu, is_processor=is_processor))
    plan = policy_named(policy).plan(box, SHAPE, Workload(batch=2, sequence=16))
    step = simulate_plan(plan, box)
    work = work_seconds(step_on(plan, box), box, plan.system.rates)
    measured = bottleneck_words(work, step.step_seconds, box)
    # Where one processor does both, compute shares it with updates of the step before, too.
    same = without_shares if is_processor else str
    assert same(measured) == same(step.bottleneck)
    assert ("GPU" in measured) is (not is_processor and work[Lane.GPU] > 0)
