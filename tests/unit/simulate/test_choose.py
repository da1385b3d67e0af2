"""The plan that is taken: no worse than the estimate's, never worse with more of anything."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from lohan.hardware.machine import Machine
from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.paper import policy_named
from lohan.plan import Workload, make_plan
from lohan.plan.block_costs import least_seconds
from lohan.plan.limits import Question
from lohan.plan.plan import Plan
from lohan.plan.policies.lesser import drive_counts, lesser_plans, ram_sizes, with_drives_of
from lohan.simulate import simulate_plan
from lohan.simulate.answers.what_if import what_ifs
from lohan.simulate.choose import EQUALLY_FAST, Judge, JudgedPlan, best_of, best_plan
from lohan.simulate.quick import quick_step
from lohan.units import GIB

DESKTOP = machine_named("desktop-4090")


def asked(machine: Machine, batch: int, *, clips: bool = False, model: str = "gpt-6b") -> Question:
    workload = Workload(batch=batch, sequence=1024, clips_gradients=clips)
    return Question(policy="lohan+", machine=machine, shape=shape_of(model), workload=workload)


def taken(question: Question) -> JudgedPlan:
    found = Judge().best(question)
    assert found is not None
    return found


def test_numbers_of_drives_come_from_a_grid_and_the_next_smaller_one() -> None:
    assert drive_counts(1) == [1, 0.75, 0.5, 0.375]
    assert drive_counts(2) == [2, 1.5, 1, 0.75, 0.5, 0.375]
    assert drive_counts(10) == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1.5, 1, 0.75, 0.5, 0.375]
    twelve = DESKTOP.with_ssds(12)
    slower = with_drives_of(twelve, 6)
    assert slower.ssd_capacity_bytes == twelve.ssd_capacity_bytes
    assert slower.ssd_read_bytes_per_second == pytest.approx(
        DESKTOP.with_ssds(6).ssd_read_bytes_per_second
    )


def test_ram_comes_from_a_grid_below_what_there_is() -> None:
    between = round(32 * 2**0.5 * GIB)
    assert ram_sizes(64 * GIB)[:5] == [64 * GIB, 48 * GIB, between, 32 * GIB, 24 * GIB]
    assert ram_sizes(40 * GIB)[:3] == [40 * GIB, 32 * GIB, 24 * GIB]
    assert len(ram_sizes(40 * GIB)) == 6
    assert ram_sizes(1) == [1]


def test_what_a_smaller_machine_plans_for_a_larger_one_plans_for_too() -> None:
    for fewer, more in ((1, 2), (2, 3), (4, 5), (5, 6), (5, 8), (6, 8), (8, 12)):
        assert set(drive_counts(fewer)) <= set(drive_counts(more))
    for less, more in ((32, 48), (48, 64), (64, 96), (96, 128), (128, 256), (384, 512), (512, 768)):
        assert less * GIB in ram_sizes(more * GIB)


def requests_looked_at(
    question: Question, may_help: Callable[[Workload], bool]
) -> list[tuple[int, float, bool]]:
    """RAM in GiB, drives and clipping of the requests that plans are made for."""
    own = make_plan("lohan+", question.machine, question.shape, question.workload)
    found = []

    def plan_for(machine: Machine, workload: Workload) -> Plan:
        count = machine.ssds[0].read_bytes_per_second / DESKTOP.ssds[0].read_bytes_per_second
        found.append((machine.ram_bytes // GIB, count, workload.clips_gradients))
        return replace(own, workload=workload)

    for _ in lesser_plans(
        question.machine, question.workload, plan_for, lambda plan: may_help(plan.workload)
    ):
        pass
    return found


def test_all_of_less_is_planned_for_together() -> None:
    question = asked(DESKTOP.with_ram(64 * GIB).with_ssds(1), 8)
    found = requests_looked_at(question, lambda workload: True)
    assert found == [
        (ram, count, clips)
        for ram in (64, 48, 45, 32, 24, 22)
        for clips in (False, True)
        for count in (1, 0.75, 0.5, 0.375)
    ]


def test_what_cannot_help_ends_the_way_down() -> None:
    question = asked(DESKTOP.with_ram(64 * GIB).with_ssds(1), 8)
    nothing = requests_looked_at(question, lambda workload: False)
    assert nothing == [(64, 1, False), (64, 1, True), (48, 1, False)]
    ample = requests_looked_at(question, lambda workload: not workload.clips_gradients)
    assert [one for one in ample if one[2]] == [(ram, 1, True) for ram in (64, 48, 45, 32, 24, 22)]


def test_of_plans_about_as_fast_the_one_that_writes_least_is_taken() -> None:
    one = taken(asked(DESKTOP, 8))

    def with_step(seconds: float, written_bytes: int) -> JudgedPlan:
        step = replace(one.step, step_seconds=seconds, written_bytes=written_bytes)
        return replace(one, step=step)

    fast, lean = with_step(1.0, 100), with_step(1.0 + EQUALLY_FAST / 2, 90)
    slow = with_step(1.0 + 2 * EQUALLY_FAST, 10)
    assert best_of([fast, lean, slow]) is lean


@pytest.mark.parametrize("clips", [True, False])
def test_what_is_taken_is_no_slower_than_any_candidate_and_fits(clips: bool) -> None:
    question = asked(DESKTOP.with_ssds(2), 64, clips=clips)
    found = taken(question)
    assert found.plan.ledger.fits
    assert found.plan.workload == question.workload
    plans: list[Plan] = []

    def plan_for(machine: Machine, workload: Workload) -> Plan:
        plans.append(make_plan("lohan+", machine, question.shape, workload))
        return plans[-1]

    for _ in lesser_plans(question.machine, question.workload, plan_for, lambda plan: True):
        pass
    for plan in plans[::9]:
        plan = replace(plan, workload=question.workload)
        step = quick_step(plan, question.machine)
        assert found.step.step_seconds <= (1 + EQUALLY_FAST) * step.step_seconds
        assert least_seconds(plan, question.machine) <= step.step_seconds
    # The schedule of what is taken stands its checks.
    full = simulate_plan(found.plan, question.machine)
    assert full.step_seconds == pytest.approx(found.step.step_seconds, rel=0.02)


def test_a_published_system_is_planned_as_it_was_published() -> None:
    workload = Workload(batch=8, sequence=1024)
    shape = shape_of("gpt-6b")
    assert best_plan(policy_named("lohan"), DESKTOP, shape, workload) == make_plan(
        policy_named("lohan"), DESKTOP, shape, workload
    )


@pytest.mark.parametrize(
    ("model", "ram_gib", "num_ssds", "batch", "clips"),
    [
        ("gpt-13b", 512, 1, 128, False),  # One more drive was 0.94x.
        ("gpt-13b", 32, 4, 32, False),  # One more drive was 0.99x, twice the RAM too.
    ],
)
def test_more_of_anything_is_never_said_to_be_slower(
    model: str, ram_gib: int, num_ssds: int, batch: int, clips: bool
) -> None:
    machine = DESKTOP.with_ram(ram_gib * GIB).with_ssds(num_ssds)
    question = asked(machine, batch, clips=clips, model=model)
    judge = Judge(is_thorough=False)
    now = judge.best(question)
    assert now is not None
    for one in what_ifs(question, now, judge):
        assert one.factor is None or one.factor >= 1.0 - EQUALLY_FAST, one


@pytest.mark.parametrize(
    ("less", "more"),
    [
        # Each was 0.3 % slower with more: what was found for less came from two lesser at once.
        ((96, 2, False), (128, 2, False)),
        ((512, 5, False), (512, 8, False)),
        ((512, 8, True), (512, 8, False)),
    ],
)
def test_more_of_anything_is_never_planned_slower(
    less: tuple[int, int, bool], more: tuple[int, int, bool]
) -> None:
    seconds = []
    judge = Judge()
    for ram_gib, num_ssds, clips in (less, more):
        name = "desktop-4090" if ram_gib < 512 else "paper-4090"
        machine = machine_named(name).with_ram(ram_gib * GIB).with_ssds(num_ssds)
        found = judge.best(asked(machine, 128, clips=clips, model="gpt-13b"))
        assert found is not None
        seconds.append(found.step.step_seconds)
    assert seconds[1] <= (1 + EQUALLY_FAST) * seconds[0]
