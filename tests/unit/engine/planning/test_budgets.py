"""The least that fits is found in round figures, and written as a user would."""

import pytest

from lohan.engine.planning.budgets import Budgets, least_bytes
from lohan.units import GIB, KIB, MIB, parse_bytes


@pytest.mark.parametrize("least", [5 * KIB, 700 * KIB, 3 * MIB, 100 * MIB, 7 * GIB])
@pytest.mark.parametrize("off", [0.4, 0.9, 1.0, 1.1, 3.0])
def test_the_least_is_found_within_a_few_percent_however_far_the_estimate(
    least: int, off: float
) -> None:
    asked: list[int] = []

    def fits(nbytes: int) -> bool:
        asked.append(nbytes)
        return nbytes >= least

    found = least_bytes(int(least * off), fits)
    assert found is not None
    assert least <= found <= least * 1.04 + KIB
    assert len(asked) < 20


def test_where_no_memory_helps_there_is_no_least() -> None:
    assert least_bytes(MIB, lambda _: False) is None


def test_budgets_are_written_as_they_are_read() -> None:
    written = Budgets(ram_bytes=100 * MIB, gpu_bytes=300 * KIB).written()
    assert written == 'ram="100MiB", gpu="300KiB"'
    assert parse_bytes("300KiB") == 300 * KIB
    assert Budgets(ram_bytes=12345, gpu_bytes=None).written() == 'ram="12345B"'


def test_what_no_plan_may_use_is_a_small_part_of_any_budget() -> None:
    for ram_bytes in (4 * MIB, 64 * MIB, GIB, 64 * GIB):
        budgets = Budgets(ram_bytes=ram_bytes, gpu_bytes=None)
        beside_gpu = budgets.reserved_bytes(num_blocks=80, computes_in_ram=False)
        assert 0 < beside_gpu <= ram_bytes * 3 / 8
        assert beside_gpu <= 112 * MIB
        in_ram = budgets.reserved_bytes(num_blocks=80, computes_in_ram=True)
        assert beside_gpu < in_ram <= ram_bytes / 2
        assert in_ram <= 128 * MIB
