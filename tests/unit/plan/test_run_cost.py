"""Money and warnings: what a run costs, and when it is worth a word."""

from dataclasses import replace
from typing import Any

import pytest

from lohan.errors import ConfigError
from lohan.hardware.drive_life import LifeSource
from lohan.hardware.machine import Machine
from lohan.hardware.presets import machine_named
from lohan.model.names import shape_of
from lohan.plan import make_plan
from lohan.plan.run_cost import run_cost, run_warnings
from lohan.plan.workload import Workload
from lohan.units import TB
from lohan.vocabulary import Tier

DESKTOP = machine_named("desktop-4090")


def test_wear_and_power_are_priced() -> None:
    cost = run_cost(DESKTOP, seconds=3600 * 100, written_bytes=120 * TB)
    # A tenth of the life of a drive of 150 dollars; 650 W for 100 hours at 15 cents.
    assert cost.drives_dollars == pytest.approx(15.0)
    assert cost.power_dollars == pytest.approx(9.75)
    assert cost.in_words().startswith("about $24.75: $15.00 of the drives' price, $9.75 of power")


def test_drives_without_a_price_have_the_usual_one() -> None:
    free = replace(DESKTOP, ssds=tuple(replace(ssd, price_dollars=0) for ssd in DESKTOP.ssds))
    cost = run_cost(free, seconds=0, written_bytes=8 * TB)
    assert cost.drives_dollars == pytest.approx(1.0)


def test_half_a_life_and_a_full_drive_are_warned_of() -> None:
    lean = DESKTOP.with_ram(16 << 30)
    workload = Workload(batch=1, sequence=1024)
    ledger = make_plan("lohan+", lean, shape_of("gpt-1.55b"), workload).ledger
    assert run_warnings(lean, ledger, written_bytes=500 * TB) == []
    (worn,) = run_warnings(lean, ledger, written_bytes=1524 * TB)
    assert "127% of the drives' rated life" in worn
    # On a desktop with as little room as makes the states take 95 % of what is allowed.
    allowed = ledger.budgets[Tier.SSD] / lean.ssds[0].capacity_bytes
    room = int(ledger.total(Tier.SSD) / 0.95 / allowed)
    small = replace(lean, ssds=(replace(lean.ssds[0], capacity_bytes=room),))
    tight = make_plan("lohan+", small, shape_of("gpt-1.55b"), workload).ledger
    assert tight.fits
    (full,) = run_warnings(small, tight, written_bytes=0)
    assert "of what is free on the drives" in full


def desktop_with(**changes: Any) -> Machine:
    changed = replace(DESKTOP, ssds=tuple(replace(ssd, **changes) for ssd in DESKTOP.ssds))
    assert Machine.from_json(changed.to_json()) == changed
    return changed


def test_a_life_is_called_what_it_is() -> None:
    assert DESKTOP.drives_life == "the drives' rated life"
    assumed = desktop_with(life=LifeSource.ASSUMED)
    assert assumed.drives_life == "the drives' assumed life"
    worn = desktop_with(life=LifeSource.WEAR_COUNTER, used_share=0.12)
    assert "own wear counter), 12% of which is used already" in worn.drives_life
    rated = worn.with_rated_lives([700 * TB])
    assert rated.drives_life == "the drives' rated life, 12% of which is used already"
    assert rated.ssd_endurance_bytes == 700 * TB * len(rated.ssds)


def test_as_many_lives_as_drives_are_stated() -> None:
    two = DESKTOP.with_ssds(2).with_rated_lives([1 * TB, 2 * TB])
    assert [ssd.endurance_bytes for ssd in two.ssds] == [1 * TB, 2 * TB]
    with pytest.raises(ConfigError, match="3 rated lives are given for 2"):
        two.with_rated_lives([1, 2, 3])


@pytest.mark.parametrize("changes", [{"used_share": -0.1}, {"used_share": "much"}])
def test_a_share_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="used_share"):
        desktop_with(**changes)


def test_a_life_of_an_unknown_source_is_refused() -> None:
    text = DESKTOP.to_json().replace('"stated"', '"guessed"')
    with pytest.raises(ConfigError, match='one of "stated", "wear counter" and "assumed"'):
        Machine.from_json(text)


def test_a_run_is_warned_of_that_would_outlive_a_worn_drive() -> None:
    ledger = make_plan("lohan+", DESKTOP, shape_of("gpt-1.55b"), Workload(batch=1, sequence=64))
    worn = desktop_with(used_share=0.95)
    assert run_warnings(worn, ledger.ledger, written_bytes=1 * TB) == []
    (found,) = run_warnings(worn, ledger.ledger, written_bytes=100 * TB)
    assert "8% of the drives' rated life, 95% of which is used already" in found
