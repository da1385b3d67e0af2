"""Where Python's and numpy's generators are, and how far they were moved."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from lohan.drive.surroundings.host_randomness import HostState, draws_between, host_state_kept

DRAWS: list[Callable[[], object]] = [
    random.random,
    lambda: [random.random() for _ in range(2000)],
    lambda: random.getrandbits(32 * 624),
    lambda: random.shuffle(list(range(50))),
    np.random.rand,
    lambda: np.random.randint(0, 7, 1900),
    lambda: (np.random.rand(700), random.random()),
]


@pytest.fixture(autouse=True)
def _left() -> None:
    with host_state_kept():
        yield


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("position", [0, 1, 311, 623, 624])
def test_what_was_drawn_is_drawn_again_in_the_same_amount(
    draw: Callable[[], object], position: int
) -> None:
    random.seed(position)
    np.random.seed(position)
    random.getrandbits(32 * position + 1)
    np.random.bytes(4 * position)
    before = HostState.now()
    draw()
    after = HostState.now()
    before.put_back()
    (drawn,) = draws_between(before, after)
    assert drawn is not None
    drawn.repeat()
    assert HostState.now() == after


def test_nothing_drawn_is_nothing() -> None:
    assert draws_between(HostState.now(), HostState.now()) == []


@pytest.mark.parametrize("draw", [lambda: random.gauss(0, 1), np.random.normal, random.seed])
def test_what_words_do_not_tell_is_unknown(draw: Callable[[], object]) -> None:
    random.seed(1)
    np.random.seed(1)
    before = HostState.now()
    draw()
    assert draws_between(before, HostState.now()) == [None]


def test_states_are_kept_around_anything() -> None:
    before = HostState.now()
    with host_state_kept():
        random.gauss(0, 1)
        np.random.normal()
    assert HostState.now() == before


def test_the_second_of_two_normal_numbers_is_put_back_too() -> None:
    np.random.seed(1)
    np.random.normal()
    before = HostState.now()
    second = np.random.normal()
    after = HostState.now()
    assert before != after
    before.put_back()
    assert HostState.now() == before
    assert np.random.normal() == second
    assert HostState.now() == after


def test_another_generator_of_numpy_is_followed_but_not_counted() -> None:
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        before = HostState.now()
        first = np.random.rand()
        assert draws_between(before, HostState.now()) == [None]
        before.put_back()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(usual)
