import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.model import Growth
from lohan.model.growth_fit import fit, points_for

COEFFICIENT = st.integers(min_value=0, max_value=10**15)
GROWTHS = st.builds(
    Growth,
    fixed=COEFFICIENT,
    per_sequence=COEFFICIENT,
    per_token=COEFFICIENT,
    per_token_pair=COEFFICIENT,
    shared_per_token=COEFFICIENT,
    shared_per_token_pair=COEFFICIENT,
)


@given(growth=GROWTHS, longest=st.one_of(st.none(), st.integers(min_value=5, max_value=10**6)))
def test_a_growth_is_found_again_exactly(growth, longest):
    points = points_for(longest)
    assert fit(points, [growth.at(*point) for point in points]) == growth


@given(fixed=COEFFICIENT, per_sequence=COEFFICIENT)
def test_with_a_fixed_sequence_only_the_batch_counts(fixed, per_sequence):
    points = points_for(None, is_sequence_fixed=True)
    growth = Growth(fixed=fixed, per_sequence=per_sequence)
    assert fit(points, [growth.at(*point) for point in points]) == growth


@pytest.mark.parametrize(
    "quantity",
    [
        lambda b, s: -(-s // 24) * 24 * b,
        lambda b, s: b * s**3,
        lambda b, s: b * b * s,
        lambda b, s: 2**b,
    ],
    ids=["rounded up", "cubic", "squared batch", "exponential"],
)
def test_what_grows_otherwise_is_refused(quantity):
    points = points_for(None)
    assert fit(points, [quantity(*point) for point in points]) is None


@pytest.mark.parametrize("longest", [5, 7, 16, 39, 40, 1024])
def test_no_point_is_longer_than_the_model_takes(longest):
    points = points_for(longest)
    assert max(sequence for _, sequence in points) <= longest
    assert len(set(points)) == 7
