"""Rates from a trace: what the simulator did with one machine is found again from its trace."""

from dataclasses import replace

import pytest

from lohan.fields import LEAST_RATE
from lohan.hardware.machine import Machine
from lohan.paper import policy_named
from lohan.plan import Workload
from lohan.plan.plan import Plan
from lohan.plan.system import DrivingRates
from lohan.schedule import Compute, Move, Task
from lohan.simulate import refine, replay, settled_schedule
from lohan.simulate.refine import (
    DEFAULT_RATES,
    LEAST_BUSY_SECONDS,
    TimedTask,
    observed_rates,
    with_rate,
)
from lohan.trace import Span, Trace
from lohan.vocabulary import BlockId, ComputeKind, Lane, TaskId, TensorKind, Tier
from support.hand_made import block, machine, model, operator

SHAPE = model(
    *[block(operator(0, gflop=200, mb=50), operator(1, gflop=100, mb=50), num_parameters=10**7)] * 6
)
RATES = (
    "ssd_read_bytes_per_second",
    "ssd_write_bytes_per_second",
    "ram_to_gpu_bytes_per_second",
    "gpu_to_ram_bytes_per_second",
    "cpu_update_parameters_per_second",
)


def another(box: Machine) -> Machine:
    """The same box with every rate different."""
    drive = replace(
        box.ssds[0],
        read_bytes_per_second=box.ssds[0].read_bytes_per_second * 0.7,
        write_bytes_per_second=box.ssds[0].write_bytes_per_second * 0.4,
    )
    return replace(
        box,
        gpu=replace(box.gpu, flops_per_second=box.gpu.flops_per_second * 1.5),
        ram_to_gpu_bytes_per_second=box.ram_to_gpu_bytes_per_second * 2.5,
        gpu_to_ram_bytes_per_second=box.gpu_to_ram_bytes_per_second * 0.5,
        cpu_update_parameters_per_second=box.cpu_update_parameters_per_second * 0.3,
        ssds=(drive,),
    )


def corrected(box: Machine, ran: list[TimedTask], rates: DrivingRates = DEFAULT_RATES) -> Machine:
    for observed in observed_rates(box, ran, rates):
        box = with_rate(box, observed)
    return box


def simulated(plan: Plan, guess: Machine, real: Machine) -> list[TimedTask]:
    """A schedule settled for one machine and run by another."""
    schedule = settled_schedule(plan, guess)
    times = replay(schedule, plan, real)
    return [
        (task, times.start_seconds[task.id], times.end_seconds[task.id]) for task in schedule.tasks
    ]


@pytest.mark.parametrize("is_duplex", [False, True])
@pytest.mark.parametrize("is_processor", [False, True])
@pytest.mark.parametrize("policy", ["lohan", "lohan+", "zero-infinity", "fuyou"])
def test_the_rates_a_trace_was_made_with_are_found_again(
    policy: str, is_processor: bool, is_duplex: bool
) -> None:
    guess = machine(ram_gb=0.9, is_duplex=is_duplex)
    guess = replace(guess, gpu=replace(guess.gpu, is_processor=is_processor))
    plan = policy_named(policy).plan(guess, SHAPE, Workload(batch=2, sequence=16))
    real = another(guess)
    ran = simulated(plan, guess, real)
    found = corrected(guess, ran, plan.system.rates)
    lanes = {one.lane for one in observed_rates(guess, ran)}
    assert {Lane.GPU, Lane.RAM_TO_GPU, Lane.GPU_TO_RAM} <= lanes
    assert policy == "lohan+" or {Lane.SSD_READ, Lane.SSD_WRITE, Lane.CPU} <= lanes
    assert found.gpu.flops_per_second == pytest.approx(real.gpu.flops_per_second, rel=1e-6)
    for name in RATES:
        wanted = getattr(real, name)
        if name.startswith("ssd") and Lane.SSD_READ not in lanes:
            wanted = getattr(guess, name)
        if name.startswith("cpu") and Lane.CPU not in lanes:
            wanted = getattr(guess, name)
        assert getattr(found, name) == pytest.approx(wanted, rel=1e-6), name
    # Refining what is right already changes nothing.
    again = corrected(found, ran, plan.system.rates)
    assert again.gpu.flops_per_second == pytest.approx(found.gpu.flops_per_second)


def read(number: int, nbytes: int = 10**8, *, lane: Lane = Lane.SSD_READ) -> Task:
    tiers = (Tier.SSD, Tier.RAM) if lane is Lane.SSD_READ else (Tier.RAM, Tier.SSD)
    return Task(TaskId(number), lane, BlockId(0), 0, Move(TensorKind.P16, *tiers, nbytes))


def span(of: Task, start: float, end: float) -> TimedTask:
    return of, start, end


def trace(*spans: TimedTask) -> list[TimedTask]:
    return list(spans)


READS = (read(0), read(1))


def test_a_lane_reaches_its_bytes_over_its_busy_time() -> None:
    run = trace(span(READS[0], 0, 0.1), span(READS[1], 0.5, 0.9))
    (found,) = observed_rates(machine(), run)
    assert found.lane is Lane.SSD_READ
    assert found.observed_per_second == pytest.approx(2e8 / 0.5)
    assert found.before_per_second == 1e9


def test_one_span_is_no_evidence() -> None:
    assert observed_rates(machine(), trace(span(READS[0], 0, 1))) == ()


def test_work_too_short_for_the_clock_says_nothing() -> None:
    tasks = (read(0, 10**5), read(1, 10**5))
    short = LEAST_BUSY_SECONDS / 10
    run = trace(span(tasks[0], 0, short), span(tasks[1], 1, 1 + short))
    assert observed_rates(machine(), run) == ()


def test_a_copy_that_vanished_counts_as_fast_as_can_be_told() -> None:
    copies = [
        Task(
            TaskId(n),
            Lane.RAM_TO_GPU,
            BlockId(0),
            0,
            Move(TensorKind.P16, Tier.RAM, Tier.GPU, 10**9),
        )
        for n in range(2)
    ]
    run = trace(span(copies[0], 0, 0), span(copies[1], 1, 1))
    assert corrected(machine(), run).ram_to_gpu_bytes_per_second == pytest.approx(2e12)


def test_time_shared_on_a_simplex_path_counts_half() -> None:
    writes = (read(2, lane=Lane.SSD_WRITE), read(3, lane=Lane.SSD_WRITE))
    run = trace(
        *(span(task, start, start + 0.4) for task, start in zip(READS, (0, 1), strict=True)),
        *(span(task, start, start + 0.4) for task, start in zip(writes, (0, 1), strict=True)),
    )
    simplex = corrected(machine(), run)
    assert simplex.ssd_read_bytes_per_second == pytest.approx(2e8 / 0.4)
    duplex = corrected(machine(is_duplex=True), run)
    assert duplex.ssd_read_bytes_per_second == pytest.approx(2e8 / 0.8)


def test_the_write_rate_follows_both_ways() -> None:
    writes = (read(0, lane=Lane.SSD_WRITE), read(1, lane=Lane.SSD_WRITE))
    fast = trace(span(writes[0], 0, 0.01), span(writes[1], 1, 1.01))
    slow = trace(span(writes[0], 0, 1), span(writes[1], 1, 2))
    assert corrected(machine(), fast).ssd_write_bytes_per_second == pytest.approx(1e10)
    assert corrected(machine(), slow).ssd_write_bytes_per_second == pytest.approx(1e8)


def test_a_trace_corrects_a_machine_but_does_not_raise_its_write_rate() -> None:
    reads, writes = READS, (read(2, lane=Lane.SSD_WRITE), read(3, lane=Lane.SSD_WRITE))
    tasks = (*reads, *writes)

    def traced(seconds: float) -> Trace:
        spans = [
            Span(
                lane=task.lane,
                name=task.name,
                start_seconds=place,
                end_seconds=place + seconds,
                task=task.id,
            )
            for place, task in enumerate(tasks)
        ]
        other = replace(spans[0], step=7, end_seconds=99.0)
        return Trace(name="run", is_simulated=False, spans=(*spans, other))

    slow, fast = (refine(machine(), tasks, traced(seconds)) for seconds in (1.0, 0.01))
    assert slow.ssd_read_bytes_per_second == pytest.approx(1e8)
    assert slow.ssd_write_bytes_per_second == pytest.approx(1e8)
    assert fast.ssd_read_bytes_per_second == pytest.approx(1e10)
    assert fast.ssd_write_bytes_per_second == machine().ssd_write_bytes_per_second


def test_the_part_of_the_gpus_memory_is_set_aside() -> None:
    tasks = [
        Task(
            TaskId(n),
            Lane.GPU,
            BlockId(0),
            0,
            Compute(ComputeKind.FORWARD, flops=10**12, touched_bytes=10**12),
        )
        for n in range(2)
    ]
    run = trace(span(tasks[0], 0, 3), span(tasks[1], 3, 6))
    assert corrected(machine(), run).gpu.flops_per_second == pytest.approx(0.5e12)
    # What is left when memory explains nearly all of the time is no rate of compute.
    tight = trace(span(tasks[0], 0, 1.01), span(tasks[1], 3, 4.01))
    assert corrected(machine(), tight) == machine()


def test_only_updates_tell_the_update_rate() -> None:
    tasks = [
        Task(TaskId(n), Lane.CPU, BlockId(0), 0, Compute(kind, num_parameters=10**9))
        for n, kind in enumerate((ComputeKind.NORM, ComputeKind.UPDATE, ComputeKind.UPDATE))
    ]
    run = trace(span(tasks[0], 0, 9), span(tasks[1], 10, 12), span(tasks[2], 12, 14))
    assert corrected(machine(), run).cpu_update_parameters_per_second == pytest.approx(0.5e9)


def test_shares_and_fixed_costs_of_a_system_are_taken_out() -> None:
    rates = DrivingRates(ssd_share=0.5)
    tasks = [replace(task, fixed_seconds=0.1) for task in READS]
    run = trace(span(tasks[0], 0, 0.3), span(tasks[1], 1, 1.3))
    found = corrected(machine(), run, rates)
    assert found.ssd_read_bytes_per_second == pytest.approx(1e9)


def test_a_rate_beyond_any_hardware_is_not_taken() -> None:
    tasks = (read(0, 10), read(1, 10))
    run = trace(span(tasks[0], 0, 10), span(tasks[1], 10, 20))
    assert corrected(machine(), run) == machine()


def test_rates_of_other_formats_stay_within_those_of_hardware() -> None:
    """A step that stood still for a while must not make a machine that cannot be."""
    box = machine()
    gpu = replace(box.gpu, flops_per_second_by_dtype=(("fp32", 2 * LEAST_RATE),))
    forwards = [
        Task(TaskId(n), Lane.GPU, BlockId(0), 0, Compute(ComputeKind.FORWARD, flops=10**12))
        for n in range(2)
    ]
    run = trace(span(forwards[0], 0, 10), span(forwards[1], 10, 20))
    found = corrected(replace(box, gpu=gpu), run).gpu
    assert found.flops_per_second == pytest.approx(box.gpu.flops_per_second / 10)
    assert found.flops_per_second_by_dtype == (("fp32", LEAST_RATE),)
