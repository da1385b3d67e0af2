"""Plans of `lohan+` with too little RAM, and with as little as they need: they can be run."""

import itertools

import pytest

from lohan.plan import Plan
from lohan.schedule import RollingSchedule, build_schedule, check_schedule
from lohan.schedule.check import check_serial
from lohan.simulate import settled_schedule
from lohan.vocabulary import ComputeKind, TaskId, Tier
from support.random_plans import random_plan, rolled_schedule

SEEDS = range(2000, 2080)
FEW_BLOCKS = 8


def lean_plan(seed: int, ram_bytes: int = 1) -> Plan:
    return random_plan(seed, policy="lohan+", most_blocks=FEW_BLOCKS, ram_bytes=ram_bytes)[0]


def test_the_leanest_buffers_let_every_step_run_one_by_one() -> None:
    kinds = set()
    for seed in SEEDS:
        plan = lean_plan(seed)
        kinds.add((plan.system.spills_gradients, bool(plan.shape.tied), plan.num_update_parts > 1))
        schedule = build_schedule(plan, num_steps=3)
        check_schedule(schedule, plan)
        rolling = RollingSchedule(plan)
        tasks = [*rolling.step(), *rolling.step(), *rolling.flush(), *rolling.evaluation()]
        tasks += [*rolling.step(), *rolling.flush()]
        check_serial(rolled_schedule(rolling, tasks, plan))
    assert {(True, True, True), (True, False, True), (False, True, True)} <= kinds


def test_pieces_of_lean_updates_run_from_the_first_to_the_last() -> None:
    for seed in SEEDS:
        updates: dict[object, list[TaskId]] = {}
        schedule = build_schedule(lean_plan(seed), num_steps=2)
        for task in schedule.tasks:
            if task.action.kind is ComputeKind.UPDATE:
                updates.setdefault((task.block, task.step), []).append(task.id)
        for pieces in updates.values():
            for before, after in itertools.pairwise(pieces):
                assert before in schedule.task(after).after, seed


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_the_ram_that_the_leanest_plan_asks_for_is_enough(seed: int) -> None:
    lean = lean_plan(seed)
    asked = lean.ledger.total(Tier.RAM)
    plan, machine = random_plan(
        seed, policy="lohan+", most_blocks=FEW_BLOCKS, ram_bytes=int(asked / 0.9) + 2
    )
    assert plan.ledger.spare(Tier.RAM) >= 0
    check_schedule(settled_schedule(plan, machine, num_steps=3), plan)
