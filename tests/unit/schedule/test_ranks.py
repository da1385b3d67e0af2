"""Steps that are dealt to reduction groups and ranks, as schedules."""

import itertools

import pytest

from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.plan import Plan, Workload, make_plan
from lohan.schedule import Move, build_schedule, check_schedule
from lohan.simulate import settled_schedule, simulate_plan
from lohan.units import GIB
from lohan.vocabulary import ComputeKind, Lane, TensorKind

MACHINE = machine_named("desktop-4090")


def plan_of(
    model: str, ranks: int, groups: int, *, clips: bool = False, ram_bytes: int = 64 * GIB
) -> Plan:
    workload = Workload(
        batch=groups // ranks,
        sequence=512,
        clips_gradients=clips,
        num_micro_batches=groups // ranks,
        num_ranks=ranks,
        reduction_groups=groups,
    )
    return make_plan("lohan+", MACHINE.with_ram(ram_bytes), shape_of(model), workload)


@pytest.mark.parametrize("model", ["gpt2", "llama-3.1-8b"])
@pytest.mark.parametrize(("ranks", "groups"), [(1, 4), (2, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("clips", [False, True])
def test_schedules_of_ranks_can_run(model: str, ranks: int, groups: int, clips: bool) -> None:
    for ram_bytes in (4 * GIB, 64 * GIB):
        plan = plan_of(model, ranks, groups, clips=clips, ram_bytes=ram_bytes)
        schedule = build_schedule(plan, num_steps=3)
        check_schedule(schedule, plan)
        check_schedule(settled_schedule(plan, MACHINE), plan)
        of_peers = [task for task in schedule.tasks if task.lane is Lane.PEER]
        assert bool(of_peers) == (ranks > 1)
        for before, task in itertools.pairwise(of_peers):
            assert before.id in task.after, "peers meet in the order of the list"


def test_ranks_share_what_is_read_and_written_and_exchange_six_bytes() -> None:
    alone, four = (plan_of("llama-3.1-8b", ranks, 4, ram_bytes=64 * GIB) for ranks in (1, 4))
    steps = [simulate_plan(plan, MACHINE) for plan in (alone, four)]
    for one, of_four in [
        (steps[0].read_bytes, steps[1].read_bytes),
        (steps[0].written_bytes, steps[1].written_bytes),
    ]:
        assert 4 * of_four <= one * 1.001
    sent = sum(
        task.action.nbytes
        for task in build_schedule(four).tasks
        if task.lane is Lane.PEER and isinstance(task.action, Move)
    )
    embedding = four.shape.kinds[four.shape.sequence_of_kinds[0]].num_parameters
    head = four.shape.kinds[four.shape.sequence_of_kinds[-1]].num_parameters
    # A lookup goes backward without weights, and the head's are there from its forward.
    expected = (6 * four.shape.num_parameters - 2 * (embedding + head)) * 3 // 4
    assert abs(sent - expected) <= 8 * len(four.blocks)


def test_the_next_weights_do_not_wait_for_a_gradient() -> None:
    plan = plan_of("llama-3.1-8b", 2, 2)
    of_peers = [task for task in build_schedule(plan).tasks if task.lane is Lane.PEER]
    kinds = [
        (task.action.kind, task.block)
        for task in of_peers
        if task.step == 0 and str(task.of_pass) != "forward"
    ]
    last = len(plan.blocks) - 1
    assert kinds[:4] == [
        (TensorKind.P16, last - 1),
        (TensorKind.G16, last),
        (TensorKind.P16, last - 2),
        (TensorKind.G16, last - 1),
    ]
    assert not any(kind is ComputeKind.NORM for kind, _ in kinds)
