from dataclasses import replace
from itertools import pairwise

import pytest

from lohan.plan.policies.ours import OURS
from lohan.plan.pools import (
    BlockSizes,
    gradient_bytes,
    part_parameters,
    pool_sizes,
    tied_trained,
    trained_parameters,
    update_parts,
    weights_bytes,
)
from lohan.plan.residency import choose_residents, fill_ram
from lohan.plan.workload import Workload
from lohan.vocabulary import TensorKind
from support.hand_made import block, model, operator

ALL = frozenset({TensorKind.P16, TensorKind.P32, TensorKind.OS32})
MODEL = model(
    block(num_parameters=100),
    block(operator(0), num_parameters=300, frozen=300),
    block(operator(0), num_parameters=200, frozen=50),
    block(num_parameters=10),
    tied=((0, 3, 100),),
)


def test_ram_goes_to_weights_then_activations_then_the_other_states() -> None:
    filled = fill_ram(450, num_parameters=100, num_trained=100, swapped_bytes=150)
    assert (filled.weights_bytes, filled.activation_bytes, filled.states_bytes) == (200, 150, 100)
    nothing = fill_ram(0, num_parameters=100, num_trained=100, swapped_bytes=150)
    assert (nothing.weights_bytes, nothing.activation_bytes, nothing.states_bytes) == (0, 0, 0)


def test_frozen_weights_do_not_push_activations_out_to_be_written() -> None:
    filled = fill_ram(450, num_parameters=200, num_trained=50, swapped_bytes=150)
    assert (filled.weights_bytes, filled.activation_bytes) == (100 + 200, 150)
    filled = fill_ram(1000, num_parameters=200, num_trained=50, swapped_bytes=150)
    assert (filled.weights_bytes, filled.states_bytes) == (400, 450)


def test_residents_are_whole_blocks_spread_evenly_with_the_first_among_them() -> None:
    filled = fill_ram(2 * 1000 + 10 * 500, num_parameters=1000, num_trained=1000, swapped_bytes=0)
    residents = choose_residents(filled, [100] * 10, [100] * 10)
    assert all(TensorKind.P16 in kinds for kinds in residents)
    with_states = [number for number, kinds in enumerate(residents) if TensorKind.OS32 in kinds]
    assert len(with_states) == 5
    assert with_states[0] == 0
    assert max(b - a for a, b in pairwise(with_states)) <= 3


def test_what_one_kind_leaves_over_the_other_uses() -> None:
    filled = fill_ram(150, num_parameters=100, num_trained=10, swapped_bytes=0)
    # No block of weights fits in 150 bytes, but the states of 10 parameters do.
    residents = choose_residents(filled, [100, 0], [0, 10])
    assert residents == [frozenset(), frozenset({TensorKind.P32, TensorKind.OS32})]
    states_first = replace(filled, weights_bytes=0, states_bytes=150)
    assert choose_residents(states_first, [10, 0], [0, 10], weights_first=False) == [
        frozenset({TensorKind.P16}),
        frozenset({TensorKind.P32, TensorKind.OS32}),
    ]


def test_blocks_without_parameters_are_never_resident() -> None:
    filled = fill_ram(10**9, num_parameters=100, num_trained=100, swapped_bytes=0)
    assert choose_residents(filled, [0, 100], [0, 100]) == [frozenset(), ALL]


def test_frozen_parameters_have_weights_but_no_gradients() -> None:
    assert weights_bytes(MODEL) == [200, 600, 400, 220]
    assert trained_parameters(MODEL) == [100, 0, 150, 10]
    assert gradient_bytes(MODEL) == [200, 0, 300, 220]
    assert tied_trained(MODEL) == [(0, 3, 100)]


def test_a_tie_to_a_frozen_owner_has_no_gradient() -> None:
    shape = model(
        block(num_parameters=100, frozen=100),
        block(operator(0)),
        block(num_parameters=0),
        tied=((0, 2, 100),),
    )
    assert tied_trained(shape) == []
    assert weights_bytes(shape)[2] == 200
    assert gradient_bytes(shape)[2] == 0


@pytest.mark.parametrize(("trained", "largest"), [(0, 5), (1, 5), (5, 5), (6, 5), (1001, 7)])
def test_parts_of_an_update_add_up_and_none_is_larger_than_the_slot(
    trained: int, largest: int
) -> None:
    parts = update_parts(trained, largest)
    assert sum(parts) == trained
    assert all(0 < part <= largest for part in parts)
    assert len(parts) == -(-trained // largest)


def test_pools_hold_the_largest_block_so_many_times() -> None:
    sizes = BlockSizes.of(MODEL, Workload(batch=1, sequence=1))
    pools = pool_sizes(OURS, sizes, num_update_parts=2, gradient_slots=2)
    assert pools["ring"] == OURS.num_ring_slots * 600
    assert pools["waiting"] == 2 * 300
    assert pools["states"] >= OURS.num_state_slots * 75 * 12
    assert pool_sizes(OURS, sizes, num_update_parts=2, gradient_slots=None)["waiting"] == 720
    spilling = replace(OURS, spills_gradients=True)
    larger = pool_sizes(spilling, sizes, num_update_parts=2, gradient_slots=2)["states"]
    assert larger - pools["states"] == OURS.num_state_slots * 75 * 4
    assert part_parameters(0, 1) == 1
