import pytest

from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.paper import policy_named
from lohan.plan import Workload, make_plan
from lohan.schedule import (
    Compute,
    Move,
    RollingSchedule,
    Task,
    build_schedule,
    dump_schedule,
)
from lohan.simulate import simulate_plan
from lohan.vocabulary import ComputeKind, Lane, TensorKind
from support.hand_made import block, machine, model, operator


def test_a_plan_far_too_large_still_settles() -> None:
    """Plans that do not fit are simulated too; this one once hung with its buffers taken."""
    box = machine_named("desktop-4090")
    plan = make_plan("lohan+", box, shape_of("gpt-175b"), Workload(batch=8, sequence=1024))
    assert not plan.ledger.fits
    assert simulate_plan(plan, box).step_seconds > 0


def test_a_frozen_block_moves_weights_and_nothing_else() -> None:
    frozen = block(operator(0), num_parameters=10**8, frozen=10**8)
    shape = model(block(num_parameters=10**8), frozen, block(num_parameters=10**8))
    plan = make_plan("lohan+", machine(ram_gb=5), shape, Workload(batch=1, sequence=16))
    tasks = [task for task in build_schedule(plan, num_steps=2).tasks if task.block == 1]
    kinds = {task.action.kind for task in tasks}
    assert TensorKind.P16 in kinds
    assert not kinds & {TensorKind.G16, TensorKind.OS32, ComputeKind.UPDATE}


def test_states_are_read_before_the_norm_is_known_but_updated_after_it() -> None:
    shape = model(*[block(operator(0), num_parameters=10**8)] * 4)
    workload = Workload(batch=1, sequence=16, clips_gradients=True)
    plan = make_plan("lohan+", machine(ram_gb=3), shape, workload)
    assert not plan.system.spills_gradients
    schedule = build_schedule(plan, num_steps=3)
    norms = {t.step: t.id for t in schedule.tasks if t.action.kind is ComputeKind.NORM}
    reads = [t for t in schedule.tasks if t.action.kind is TensorKind.OS32 and t.lane == "ssd_read"]
    assert reads
    assert not any(norms[task.step] in task.after for task in reads)
    updates = [task for task in schedule.tasks if task.action.kind is ComputeKind.UPDATE]
    assert all(norms[task.step] in task.after for task in updates)


def test_a_step_reads_the_first_states_of_updates_that_are_put_off_and_a_flush_the_others() -> None:
    shape = model(*[block(operator(0), num_parameters=10**8)] * 8)
    workload = Workload(batch=1, sequence=16, clips_gradients=True)
    plan = make_plan("lohan+", machine(ram_gb=2.5), shape, workload)
    assert not any(block.residents for block in plan.blocks), "all pieces are of one size"
    rolling = RollingSchedule(plan)
    first, rest = rolling.step(), rolling.flush()

    def reads(tasks: tuple[Task, ...]) -> list[tuple[int, int]]:
        return [
            (t.block, t.piece.number) for t in tasks if t.lane is Lane.SSD_READ and "OS32" in t.name
        ]

    slot = max(
        lease.nbytes for t in (*first, *rest) for lease in t.leases if lease.pool == "states"
    )
    ahead, later = reads(first), reads(rest)
    # All slots but one.
    assert len(ahead) == rolling.pools["states"].capacity_bytes // slot - 1
    assert sorted(ahead + later) == ahead + later
    assert len(set(ahead + later)) == len(ahead + later)


def test_gradients_of_shared_weights_wait_for_the_update_of_their_owner() -> None:
    shape = model(
        block(num_parameters=10**6),
        block(operator(0)),
        block(num_parameters=0),
        tied=((0, 2, 10**6),),
    )
    plan = make_plan("lohan+", machine(), shape, Workload(batch=1, sequence=16))
    schedule = build_schedule(plan)
    shared = next(t for t in schedule.tasks if t.block == 2 and t.action.kind is TensorKind.G16)
    assert [lease.key for lease in shared.leases] == ["2 for 0 s0"]
    update = next(t for t in schedule.tasks if t.block == 0 and t.action.kind is ComputeKind.UPDATE)
    assert shared.id in update.after
    assert shared.leases[0] in update.returns


def test_dump_names_pools_lanes_tasks_and_what_they_come_after() -> None:
    plan = policy_named("lohan").plan(
        machine(), model(*[block(operator(0))] * 3), Workload(batch=1, sequence=16)
    )
    schedule = build_schedule(plan, num_steps=2)
    text = dump_schedule(schedule)
    assert text.startswith("2 steps, 3 blocks,")
    assert "open order" in text
    assert "lane gpu\n" in text
    assert "backward b1" in text
    assert text.count("\n") > dump_schedule(schedule, step=0).count("\n")
    assert text.isascii()


@pytest.mark.parametrize("policy", ["g10", "gpu-only", "flashneuron"])
def test_updates_on_the_gpu_count_the_memory_they_touch(policy: str) -> None:
    shape = model(*[block(operator(0))] * 3)
    plan = policy_named(policy).plan(machine(), shape, Workload(batch=1, sequence=16))
    schedule = build_schedule(plan)
    updates = [t.action for t in schedule.tasks if t.action.kind is ComputeKind.UPDATE]
    assert all(isinstance(action, Compute) and action.touched_bytes for action in updates)
    assert "28.0 MB" in dump_schedule(schedule) or "26.7 MiB" in dump_schedule(schedule)
    moves = [t.action for t in schedule.tasks if isinstance(t.action, Move)]
    carries_states = any(move.kind is TensorKind.OS32 for move in moves)
    assert carries_states == (policy == "g10")
