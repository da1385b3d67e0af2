"""What is run again, against a judge that tries every set of operators on small random graphs."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lohan.model import INPUT, BlockShape, Growth, OperatorShape, recomputation

MAX_OPERATORS = 7


@st.composite
def blocks(draw):
    count = draw(st.integers(min_value=1, max_value=MAX_OPERATORS))
    # Ordinals have gaps where views were.
    gaps = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    indices = [sum(gaps[: place + 1]) for place in range(count)]
    operators = []
    for place, index in enumerate(indices):
        earlier = [INPUT, *indices[:place]]
        operators.append(
            OperatorShape(
                index=index,
                name=f"o{index}",
                inputs=tuple(sorted(draw(st.sets(st.sampled_from(earlier), max_size=3)))),
                output_bytes=Growth(fixed=3**place),
                forward_flops=Growth(fixed=2**place),
                touched_bytes=Growth(fixed=5**place),
                is_saved=draw(st.booleans()),
            )
        )
    block = BlockShape(name="random", num_parameters=0, operators=tuple(operators))
    return block, draw(st.sets(st.sampled_from(indices)))


def is_enough(block, available, rerun):
    present = {INPUT} | available
    for operator in block.operators:
        if operator.index in rerun:
            if not present >= set(operator.inputs):
                return False
            present.add(operator.index)
    return all(operator.index in present for operator in block.operators if operator.is_saved)


def smallest(block, available):
    indices = [operator.index for operator in block.operators]
    for size in range(len(indices) + 1):
        for rerun in combinations(indices, size):
            if is_enough(block, available, set(rerun)):
                return rerun
    raise AssertionError("running everything again is always enough")


@given(case=blocks())
def test_the_smallest_sufficient_set_is_found(case):
    block, available = case
    found = recomputation(block, available)
    judged = smallest(block, available)
    assert found.operators == judged
    again = [operator for operator in block.operators if operator.index in judged]
    assert found.flops == Growth.total(operator.forward_flops for operator in again)


@given(case=blocks())
def test_more_at_hand_never_means_more_to_run(case):
    block, available = case
    fewer = set(sorted(available)[::2])
    assert set(recomputation(block, available).operators) <= set(
        recomputation(block, fewer).operators
    )
