from dataclasses import replace

import pytest

from lohan.paper import POLICY_NAMES, policy_named
from lohan.plan import Workload, make_plan
from lohan.plan.system import DrivingRates
from lohan.schedule import Compute, Move, Task
from lohan.simulate import read_off, replay, settled_schedule, simulate_plan
from lohan.simulate.answers.advice import limit_sentence
from lohan.simulate.bottleneck import with_remedy, without_shares
from lohan.simulate.durations import Durations
from lohan.vocabulary import BlockId, ComputeKind, Lane, TaskId, TensorKind, Tier
from support.hand_made import block, machine, model, operator


def seconds(
    lane: Lane, action: Move | Compute, rates: DrivingRates | None = None, *, num_gpus: int = 1
) -> float:
    durations = Durations(machine(num_gpus=num_gpus), rates or DrivingRates())
    return durations.of(Task(TaskId(0), lane, BlockId(0), 0, action))


READ = Move(TensorKind.P16, Tier.SSD, Tier.RAM, 10**9)
COPY = Move(TensorKind.A16, Tier.GPU, Tier.RAM, 10**9)
UPDATE = Compute(ComputeKind.UPDATE, num_parameters=10**9)


def test_a_task_takes_its_bytes_flops_or_parameters_over_the_rate() -> None:
    assert seconds(Lane.SSD_READ, READ) == pytest.approx(1)
    assert seconds(Lane.GPU_TO_RAM, COPY) == pytest.approx(1)
    assert seconds(Lane.GPU, Compute(ComputeKind.FORWARD, flops=10**12)) == pytest.approx(1)
    touching = Compute(ComputeKind.UPDATE, touched_bytes=10**12)
    assert seconds(Lane.GPU, touching) == pytest.approx(1)
    assert seconds(Lane.CPU, UPDATE) == pytest.approx(1)
    reduce = Compute(ComputeKind.REDUCE, num_parameters=28 * 10**8)
    assert seconds(Lane.CPU, reduce) == pytest.approx(0.6)


def test_compute_takes_the_longer_of_device_and_host() -> None:
    """A processor does both itself, one after the other."""
    work = Compute(ComputeKind.FORWARD, flops=10**12, num_launches=300)
    for operator_seconds, on_gpu, on_processor in ((1e-3, 1, 1.3), (1e-2, 3, 4)):
        box = replace(machine(), operator_seconds=operator_seconds)
        processor = replace(box, gpu=replace(box.gpu, is_processor=True))
        for one, expected in ((box, on_gpu), (processor, on_processor)):
            task = Task(TaskId(0), Lane.GPU, BlockId(0), 0, work)
            durations = Durations(one, DrivingRates())
            assert durations.of(task) == pytest.approx(expected)
            assert durations.launching(task) == pytest.approx(300 * operator_seconds)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_host_that_launches_too_slowly_is_the_bottleneck_with_its_remedy(
    num_micro_batches: int,
) -> None:
    shape = model(*[block(operator(0, gflop=1, mb=1), operator(9, gflop=1, mb=1))] * 4)
    workload = Workload(batch=2, sequence=16, num_micro_batches=num_micro_batches)
    fast, slow = (replace(machine(), operator_seconds=each) for each in (1e-9, 1e-2))
    plan = make_plan("lohan+", slow, shape, workload)
    step = simulate_plan(plan, slow)
    # Ten operators of each block forward, twice as many backward, what is run again beside them.
    least = 1e-2 * num_micro_batches * 4 * 10 * 3
    assert least <= step.launch_seconds <= least * 4 / 3
    assert step.step_seconds >= step.launch_seconds
    assert step.bottleneck.startswith("launching work by the host")
    assert "larger micro-batches" in with_remedy(step.bottleneck)
    assert "larger micro-batches" in limit_sentence(without_shares(step.bottleneck), 1.0, [])
    quick = simulate_plan(make_plan("lohan+", fast, shape, workload), fast)
    assert quick.step_seconds < step.step_seconds
    assert with_remedy(quick.bottleneck) == quick.bottleneck


def test_a_system_may_reach_less_than_the_machine() -> None:
    half = DrivingRates(gpu_share=0.5, ssd_share=0.5, cpu_share=0.5, copy_share=0.5)
    assert seconds(Lane.SSD_READ, READ, half) == pytest.approx(2)
    assert seconds(Lane.GPU_TO_RAM, COPY, half) == pytest.approx(2)
    assert seconds(Lane.CPU, UPDATE, half) == pytest.approx(2)
    pageable = DrivingRates(activation_copy_bytes_per_second=0.25e9)
    assert seconds(Lane.GPU_TO_RAM, COPY, pageable) == pytest.approx(4)


def test_several_gpus_stage_state_bytes_or_divide_copies() -> None:
    staged = DrivingRates(staging_bytes_per_second=1e9)
    assert seconds(Lane.SSD_READ, READ, staged) == pytest.approx(1)
    assert seconds(Lane.SSD_READ, READ, staged, num_gpus=2) == pytest.approx(2)
    divided = DrivingRates(partitions_over_gpus=True)
    assert seconds(Lane.GPU_TO_RAM, COPY, divided, num_gpus=2) == pytest.approx(0.5)
    assert seconds(Lane.CPU, UPDATE, divided, num_gpus=2) == pytest.approx(0.5)


SHAPE = model(*[block(operator(0), num_parameters=10**8)] * 4)


def test_result_fields_follow_from_each_other() -> None:
    box = machine(ram_gb=10)
    plan = policy_named("lohan").plan(box, SHAPE, Workload(batch=2, sequence=16))
    step = simulate_plan(plan, box)
    parts = step.forward_seconds + step.backward_seconds + step.optimizer_seconds
    assert parts == pytest.approx(step.step_seconds)
    assert step.tokens_per_second == pytest.approx(32 / step.step_seconds)
    assert step.sequences_per_second == pytest.approx(2 / step.step_seconds)
    assert step.paper_tflops == pytest.approx(step.tokens_per_second * 8 * 4e8 / 1e12)
    # Four operators of 1e9 FLOPs forward and 2e9 backward, whatever is run again.
    assert step.model_flops == 12e9
    assert step.model_tflops == pytest.approx(12e-3 / step.step_seconds)
    assert 0 < step.roofline_share <= 1
    assert step.busy_share(Lane.PEER) == 0
    assert step.busy_share(Lane.GPU) > 0
    assert step.endurance_share_per_step == step.written_bytes / 1e15
    assert step.num_steps_for(3200) == pytest.approx(100)
    assert step.price_dollars == 2100
    fields = step.to_json_fields()
    assert fields["simulated"] is True
    assert fields["written_bytes_per_step"] == step.written_bytes == 14 * 4 * 10**8


def test_bottleneck_is_named_or_said_to_be_mutual_waiting() -> None:
    box = machine(ssd_gb=0.01, ram_gb=5)
    slow = simulate_plan(
        policy_named("lohan").plan(box, SHAPE, Workload(batch=1, sequence=16)), box
    )
    assert slow.bottleneck.startswith("the SSDs (")
    assert slow.roofline_resource == "the SSDs"
    even = machine(ram_gb=10, link_gb=1, tflops=0.01)
    serial = policy_named("zero-infinity").plan(even, SHAPE, Workload(batch=1, sequence=16))
    assert "waiting of" in simulate_plan(serial, even).bottleneck


def test_duplex_drives_are_judged_by_their_busier_direction() -> None:
    box = machine(ssd_gb=0.01, ram_gb=5, is_duplex=True)
    step = simulate_plan(
        policy_named("lohan").plan(box, SHAPE, Workload(batch=1, sequence=16)), box
    )
    assert step.roofline_resource in ("SSD reads", "SSD writes")


def test_a_longer_simulation_says_the_same() -> None:
    box = replace(machine(ram_gb=6), name="box")
    plan = make_plan("lohan+", box, SHAPE, Workload(batch=2, sequence=16))
    short = simulate_plan(plan, box)
    schedule = settled_schedule(plan, box, num_steps=12)
    long = read_off(schedule, replay(schedule, plan, box), plan, box)
    assert long.step_seconds == pytest.approx(short.step_seconds, rel=0.01)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("frozen", [0, 10**6])
def test_a_model_that_trains_nothing_still_takes_a_step(frozen: int, clips: bool) -> None:
    shape = model(*[block(operator(0), num_parameters=frozen, frozen=frozen)] * 3)
    workload = Workload(batch=1, sequence=16, clips_gradients=clips)
    for policy in POLICY_NAMES:
        step = simulate_plan(policy_named(policy).plan(machine(), shape, workload), machine())
        assert step.step_seconds > 0
        # Only activations move; a norm of nothing takes no time.
        assert step.busy_seconds.get(Lane.CPU, 0) == 0
        assert policy != "lohan+" or step.written_bytes == 0


def test_ranks_send_at_the_rate_of_their_link() -> None:
    linked = Durations(replace(machine(), peer_bytes_per_second=0.25e9), DrivingRates())
    assert linked.of(Task(TaskId(0), Lane.PEER, BlockId(0), 0, COPY)) == pytest.approx(4)
