"""What a run writes to its SSDs, and the plan that keeps to a limit."""

import functools
from dataclasses import replace

import pytest

from lohan.engine.planning.write_limit import (
    WRITE_PRICES,
    Candidate,
    WriteLimit,
    deferred_share,
    fastest_within,
    with_write_price,
    written_by_run,
    written_by_seal,
)
from lohan.errors import DoesNotFit
from lohan.fields import LEAST_RATE
from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.plan import make_plan
from lohan.plan.workload import Workload
from lohan.simulate.quick import quick_step
from lohan.units import GB, GIB, TB
from lohan.vocabulary import TensorKind


@functools.cache
def candidates(*, ram_bytes: int = 128 * GIB, clips: bool = False) -> tuple[Candidate, ...]:
    machine = machine_named("paper-4090").with_ram(ram_bytes)
    workload = Workload(batch=64, sequence=1024, clips_gradients=clips)
    plans = [
        make_plan("lohan+", with_write_price(machine, price), shape_of("gpt-13b"), workload)
        for price in WRITE_PRICES
    ]
    return tuple(
        Candidate(plan=plan, machine=machine, step=quick_step(plan, machine)) for plan in plans
    )


def fastest() -> Candidate:
    return min(candidates(), key=lambda one: one.step.step_seconds)


def test_a_limit_is_kept_by_swapping_less() -> None:
    found = candidates()
    freely = fastest()
    half = WriteLimit(
        budget_bytes=written_by_run(
            freely.plan, freely.step.written_bytes // 2, num_steps=1000, num_seals=10
        ),
        num_steps=1000,
        num_seals=10,
    )
    kept = fastest_within(found, half, is_binding=True)
    assert kept.step.written_bytes <= freely.step.written_bytes // 2
    assert kept.step.step_seconds > freely.step.step_seconds
    assert half.run_bytes(kept.plan, kept.step.written_bytes) <= half.budget_bytes


def test_a_limit_with_room_changes_nothing() -> None:
    wide = WriteLimit(budget_bytes=10**18, num_steps=1000)
    freely = fastest()
    assert fastest_within(candidates(), wide, is_binding=True) is freely


def test_what_cannot_be_kept_is_refused_with_the_numbers_and_what_would_fit() -> None:
    least = min(one.step.written_bytes for one in candidates())
    limit = WriteLimit(budget_bytes=TB, num_steps=1000)
    with pytest.raises(DoesNotFit) as refused:
        fastest_within(candidates(), limit, is_binding=True)
    said = refused.value
    assert "1.0 TB are allowed (write_budget)" in said.what
    assert f"1,000 steps write {least / GB:.1f} GB each" in said.why
    assert "steps fit (max_steps)" in said.remedy
    assert "raise offload.write_budget" in said.remedy


def test_a_run_that_is_going_on_takes_the_plan_that_writes_least() -> None:
    limit = WriteLimit(budget_bytes=1, num_steps=1000)
    kept = fastest_within(candidates(), limit, is_binding=False)
    assert kept.step.written_bytes == min(one.step.written_bytes for one in candidates())


def test_seals_write_what_lives_in_ram_and_a_run_its_first_states_too() -> None:
    plan = candidates(ram_bytes=512 * GIB)[0].plan
    everything = {TensorKind.P16, TensorKind.P32, TensorKind.OS32}
    assert all(everything <= block.residents for block in plan.blocks)
    num_parameters = plan.shape.num_parameters
    assert written_by_seal(plan) == 12 * num_parameters
    assert written_by_run(plan, 7, num_steps=10, num_seals=3) == 4 * 12 * num_parameters + 70


def test_with_clipping_every_update_is_written_late() -> None:
    assert deferred_share(candidates(clips=True)[0].plan) == 1.0
    assert 0.0 <= deferred_share(candidates()[0].plan) < 1.0


def test_drives_that_are_hardly_there_can_be_planned_with() -> None:
    """As a step may have found them that met a drive in trouble."""
    box = machine_named("paper-4090")
    slow = replace(box.ssds[0], write_bytes_per_second=LEAST_RATE)
    for price in WRITE_PRICES:
        dearer = with_write_price(replace(box, ssds=(slow,)), price)
        assert dearer.ssds[0].write_bytes_per_second == LEAST_RATE
