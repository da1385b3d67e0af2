"""Buffers of `lohan+`: generous where they fit, lean where they do not."""

from dataclasses import replace

import pytest

from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.plan import Plan, Workload, make_plan
from lohan.plan.policies.our_buffers import buffer_sets
from lohan.units import GIB, MIB
from lohan.vocabulary import TensorKind, Tier


def plan_with(ram_bytes: int, *, model: str = "smollm2-135m", clips: bool = True) -> Plan:
    machine = machine_named("desktop-4090").with_ram(ram_bytes)
    workload = Workload(batch=1, sequence=256, clips_gradients=clips)
    return make_plan("lohan+", machine, shape_of(model), workload)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-3.1-8b"])
def test_states_of_five_times_the_ram_have_a_plan(model: str, clips: bool) -> None:
    states_bytes = 12 * shape_of(model).num_parameters
    plan = plan_with(states_bytes // 5, model=model, clips=clips)
    assert plan.ledger.spare(Tier.RAM) >= 0


def test_the_least_ram_grows_with_the_largest_block_and_not_with_the_number_of_blocks() -> None:
    shape = shape_of("smollm2-135m")
    first, *inner, last = shape.sequence_of_kinds
    longer = replace(
        shape,
        sequence_of_kinds=(first, *inner, *inner, last),
        tied=tuple((owner, other + len(inner), count) for owner, other, count in shape.tied),
    )
    machine = machine_named("desktop-4090").with_ram(1)
    workload = Workload(batch=1, sequence=256, clips_gradients=True)
    short, long = (make_plan("lohan+", machine, one, workload) for one in (shape, longer))
    assert long.ledger.total(Tier.RAM) == short.ledger.total(Tier.RAM)


def test_with_ram_to_spare_buffers_are_generous() -> None:
    plan = plan_with(64 * GIB)
    assert plan.num_update_parts == 1
    assert plan.system.num_ring_slots == 3


def test_smaller_pieces_leave_ram_to_states_where_that_is_faster() -> None:
    plan = plan_with(3 * GIB)
    assert plan.num_update_parts > 1
    assert plan.system.num_ring_slots == 3
    assert not plan.system.spills_gradients
    # In whole blocks the states in flight alone would take most of it.
    states = next(line for line in plan.ledger.lines if line.purpose == "states in flight")
    resident = next(line for line in plan.ledger.lines if line.purpose == "resident states")
    assert plan.num_update_parts * states.nbytes > GIB
    assert resident.nbytes > GIB


@pytest.mark.slow
def test_less_ram_never_makes_a_plan_that_fits_out_of_one_that_does_not() -> None:
    fits = [plan_with(ram * MIB).ledger.fits for ram in range(96, 1024, 32)]
    assert fits == sorted(fits)
    assert not fits[0]
    assert fits[-1]


def test_weights_are_not_kept_for_updates_that_read_them_anyway() -> None:
    assert plan_with(64 * GIB).system.num_held_slots == 0
    assert plan_with(64 * GIB, clips=False).system.num_held_slots == 3


def test_gradients_of_shared_weights_have_room_until_their_owner_has_its_own() -> None:
    shape = shape_of("gpt2")
    shared = replace(shape, tied=tuple((0, other, 38_597_376) for other in (5, 7, 9, 11, 13)))
    step = Workload(batch=1, sequence=1)
    clipped = replace(step, clips_gradients=True)
    waiting = [one.gradient_slots for one in buffer_sets(shared, step)]
    assert min(waiting) == 6
    assert [one.gradient_slots for one in buffer_sets(shared, clipped)][-1] == 1


def test_residents_of_alike_blocks_are_spread_over_the_model() -> None:
    """In a row they would leave the drives idle in one half of a pass and late in the other."""
    workload = Workload(batch=16, sequence=1024, clips_gradients=True)
    plan = make_plan("lohan+", machine_named("paper-4090"), shape_of("gpt-70b"), workload)
    is_resident = [TensorKind.OS32 in block.residents for block in plan.blocks]
    middle = len(is_resident) // 2
    early, late = sum(is_resident[:middle]), sum(is_resident[middle:])
    assert 0 < early + late < len(is_resident)
    assert abs(early - late) <= 0.1 * middle
