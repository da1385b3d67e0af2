"""The RAM that would be enough, in the error of a run that does not fit."""

import pytest

from lohan.errors import DoesNotFit
from lohan.runtime.smallest_budget import with_enough_ram
from lohan.units import MIB, parse_bytes

ERROR = DoesNotFit("it needs more", why="buffers", remedy="use a smaller batch")


@pytest.mark.parametrize("needed_mib", [101, 130, 200, 999, 5000])
def test_the_budget_it_names_fits_and_is_not_far_from_the_least(needed_mib: int) -> None:
    said = with_enough_ram(ERROR, 100 * MIB, lambda nbytes: nbytes >= needed_mib * MIB)
    assert "the budget of RAM is 100.0 MiB" in said.what
    named = parse_bytes(said.remedy.removeprefix("a budget of ").partition(" is enough")[0])
    assert needed_mib * MIB * 0.99 <= named <= needed_mib * MIB * 1.1
    assert said.remedy.endswith("or use a smaller batch")


@pytest.mark.parametrize("answer", [True, False])
def test_where_ram_does_not_help_nothing_is_promised(answer: bool) -> None:
    assert with_enough_ram(ERROR, MIB, lambda _: answer) is ERROR
