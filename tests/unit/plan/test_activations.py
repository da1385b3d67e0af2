from lohan.plan.activations import (
    SwapPoint,
    SwapStep,
    assign_tiers,
    best_point,
    merged_items,
    spread_tiers,
    swap_order,
    swap_points,
    swappable_indices,
)
from lohan.plan.block_costs import block_costs
from lohan.plan.cost import Traffic, stage_seconds
from lohan.plan.plan import BlockPlan
from lohan.vocabulary import Choice
from support.hand_made import block, machine, operator

# Two matrix products and what follows each: the second product's result is in nobody's way.
BLOCK = block(
    operator(0, mb=4, gflop=8),
    operator(1, inputs=(0,), mb=4, gflop=0),
    operator(2, inputs=(1,), mb=1, gflop=8, is_saved=False),
)


# Costs and ranks of one block ----------------------------------------------------------------


def test_costs_of_a_block_follow_its_choices() -> None:
    decisions = BlockPlan(
        input_choice=Choice.SWAP_TO_RAM,
        choices=((0, Choice.SWAP_TO_SSD), (1, Choice.KEEP)),
    )
    costs = block_costs(BLOCK, decisions, 1, 1, True)
    assert (costs.to_ram_bytes, costs.to_ssd_bytes, costs.kept_bytes) == (2e6, 4e6, 4e6)
    assert costs.swapped_bytes == 6e6
    assert (costs.forward_flops, costs.backward_flops) == (16e9, 32e9)
    # Operator 2 is kept by nobody: it is run again only by who does not know better.
    assert costs.recompute_flops == 0
    assert block_costs(BLOCK, decisions, 1, 1, False).recompute_flops == 8e9


def test_outputs_with_flops_or_kept_by_autograd_can_be_swapped() -> None:
    assert swappable_indices(BLOCK) == (0, 1, 2)


def test_published_order_is_flops_per_byte() -> None:
    steps = swap_order(BLOCK, 1, 1, False)
    assert [step.operator_index for step in steps] == [2, 0, 1]
    assert [step.saved_flops for step in steps] == [8e9, 8e9, 0]


def test_our_order_counts_what_a_rerun_really_saves() -> None:
    steps = swap_order(BLOCK, 1, 1, True)
    # Operator 2 saves nothing, so it is not worth a byte, and the list ends with nothing to rerun.
    assert [step.operator_index for step in steps] == [0]
    assert sum(step.saved_flops for step in steps) == 8e9


def test_our_order_goes_on_where_only_two_outputs_together_help() -> None:
    shape = block(
        operator(0, mb=1, gflop=8, is_saved=False),
        operator(1, inputs=(0,), mb=2, gflop=0),
        operator(2, inputs=(0,), mb=3, gflop=0),
    )
    steps = swap_order(shape, 1, 1, True)
    # The product itself is the cheapest way to spare both readers their input.
    assert [step.operator_index for step in steps] == [0]
    large = block(
        operator(0, mb=9, gflop=8, is_saved=False),
        operator(1, inputs=(0,), mb=1, gflop=0),
        operator(2, inputs=(0,), mb=1, gflop=0),
    )
    steps = swap_order(large, 1, 1, True)
    assert sum(step.saved_flops for step in steps) == 8e9


# The walk ------------------------------------------------------------------------------------


def step(index: int, mb: int, gflop: int) -> SwapStep:
    return SwapStep(index, mb * 10**6, gflop * 10**9)


def test_inputs_are_covered_before_anything_else() -> None:
    points = swap_points([(), (step(0, 4, 8),), ()], [0, 2 * 10**6, 0], 8 * 10**9)
    assert [point.swapped_bytes for point in points] == [2e6, 6e6]
    assert [point.recompute_flops for point in points] == [8e9, 0]
    assert [point.largest_block_bytes for point in points] == [2e6, 6e6]


def test_items_of_all_blocks_are_merged_by_flops_per_byte_but_keep_their_blocks_order() -> None:
    first = (step(5, 1, 4), step(6, 1, 9))  # the second saves more only because of the first
    second = (step(1, 1, 5), step(2, 1, 1))
    merged = [(number, item.operator_index) for number, item in merged_items([first, second])]
    assert merged == [(1, 1), (0, 5), (0, 6), (1, 2)]


def seconds_of(point: SwapPoint) -> float:
    """GPU time falls with what is swapped; the drives are idle below 50 MB and cost above."""
    traffic = Traffic(
        forward_flops=0,
        backward_flops=100e9,
        recompute_flops=point.recompute_flops,
        num_parameters=0,
        swapped_bytes=point.swapped_bytes,
        spilled_bytes=0,
        state_read_bytes=0,
        state_written_bytes=0,
        weight_read_bytes=100e6,
        weight_copy_bytes=0,
    )
    return stage_seconds(machine(), traffic)


def test_a_plateau_does_not_end_the_walk() -> None:
    """The published walk stops when a step does not get shorter; it may only pause.

    The middle output saves no FLOPs of its own (it only feeds what the third saves), so the time
    stays the same for one step and falls again with the next.
    """
    order = (step(0, 1, 20), step(1, 1, 0), step(2, 1, 20))
    points = swap_points([(), order, ()], [0, 0, 0], 40 * 10**9)
    times = [seconds_of(point) for point in points]
    assert times[1] == times[2] > times[3]
    stopped = next(n for n in range(1, len(times)) if times[n] >= times[n - 1]) - 1
    assert stopped == 1
    assert best_point(points, seconds_of) is points[3]


def test_among_equals_the_point_that_swaps_least_is_taken() -> None:
    points = swap_points([(step(0, 1, 0), step(1, 1, 0))], [0], 0)
    assert best_point(points, seconds_of) is points[0]


def test_a_very_long_list_is_searched_as_well_as_a_short_one() -> None:
    for turning in (0, 1, 777, 2500, 4999):
        numbers = list(range(5000))
        assert best_point(numbers, lambda n, at=turning: 1 + abs(n - at)) == turning  # type: ignore[misc]


# Tiers ---------------------------------------------------------------------------------------


def test_ram_goes_to_the_last_blocks_and_counts_every_gpu() -> None:
    orders = [(), (step(0, 4, 8),), (step(0, 4, 8),), ()]
    inputs = [0, 2 * 10**6, 2 * 10**6, 0]
    plans = assign_tiers(orders, inputs, 2, 14 * 10**6, bytes_factor=2)
    assert plans[2].input_choice is Choice.SWAP_TO_RAM
    assert plans[2].choices == ((0, Choice.SWAP_TO_RAM),)
    # 12 of the 14 million bytes are taken twice over: what is left holds nothing more.
    assert plans[1].input_choice is Choice.SWAP_TO_SSD
    assert plans[1].choices == ((0, Choice.SWAP_TO_SSD),)


def test_room_is_spread_evenly_and_never_overdrawn() -> None:
    orders = [()] + [(step(0, 4, 8),)] * 8 + [()]
    inputs = [0] + [2 * 10**6] * 8 + [0]
    rooms = ((Choice.KEEP, 12 * 10**6), (Choice.SWAP_TO_RAM, 24 * 10**6))
    plans = spread_tiers(orders, inputs, 8, rooms)
    used = dict.fromkeys(Choice, 0)
    halves = [dict.fromkeys(Choice, 0), dict.fromkeys(Choice, 0)]
    for number, plan in enumerate(plans[1:-1]):
        pieces = [(plan.input_choice, 2), *((choice, 4) for _, choice in plan.choices)]
        for choice, mb in pieces:
            used[choice] += mb
            halves[number // 4][choice] += mb
    assert used[Choice.KEEP] == 12
    assert used[Choice.SWAP_TO_RAM] == 24
    assert used[Choice.SWAP_TO_SSD] == 12
    assert abs(halves[0][Choice.SWAP_TO_SSD] - halves[1][Choice.SWAP_TO_SSD]) <= 4
