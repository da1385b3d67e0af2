"""Reading states piece by piece."""

import weakref
from collections.abc import Iterator

import pytest
import torch

from lohan.engine.results import of_one_step
from lohan.errors import ScheduleError


def test_what_was_given_away_is_not_held_while_the_next_is_made() -> None:
    given: list[weakref.ref[torch.Tensor]] = []

    def make() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            assert all(one() is None for one in given)
            yield name, torch.ones(3)

    for _, tensor in of_one_step(make(), lambda: 1):
        given.append(weakref.ref(tensor))
        del tensor
    assert len(given) == 3


def test_a_step_between_two_pieces_is_refused() -> None:
    steps = iter([1, 1, 2, 2])
    found = of_one_step(iter("abc"), lambda: next(steps))
    assert next(found) == "a"
    assert next(found) == "b"
    with pytest.raises(ScheduleError, match="step"):
        next(found)
