import pytest

from lohan.errors import ConfigError, DoesNotFit
from lohan.plan import Ledger, LedgerLine, Workload
from lohan.units import GIB
from lohan.vocabulary import Tier


def line(tier: Tier, purpose: str, gib: int, *, is_constant: bool = False) -> LedgerLine:
    return LedgerLine(
        tier=tier, purpose=purpose, nbytes=gib * GIB, remedy="buy more", is_constant=is_constant
    )


LEDGER = Ledger(
    lines=(
        line(Tier.GPU, "weights", 4),
        line(Tier.RAM, "buffers", 30, is_constant=True),
        line(Tier.RAM, "states", 90),
        line(Tier.RAM, "nothing", 0),
    ),
    budgets={Tier.GPU: 24 * GIB, Tier.RAM: 100 * GIB, Tier.SSD: 0},
)


def test_ledger_adds_up_per_tier_and_lists_the_largest_line_first() -> None:
    assert LEDGER.total(Tier.RAM) == 120 * GIB
    assert LEDGER.constant(Tier.RAM) == 30 * GIB
    assert LEDGER.spare(Tier.GPU) == 20 * GIB
    assert [one.purpose for one in LEDGER.lines_of(Tier.RAM)] == ["states", "buffers"]
    assert LEDGER.shortages() == {Tier.RAM: 20 * GIB}
    assert not LEDGER.fits
    assert {row["purpose"] for row in LEDGER.to_rows()} == {
        "weights",
        "buffers",
        "states",
        "budget",
    }


def test_refusal_names_the_tier_the_shortage_the_largest_part_and_the_remedy() -> None:
    with pytest.raises(DoesNotFit) as refused:
        LEDGER.require_fit("gpt-13b")
    text = str(refused.value)
    for part in (
        "gpt-13b needs 120.0 GiB of RAM",
        "100.0 GiB allowed",
        "short by 20.0 GiB",
        "90.0 GiB of states",
        "buy more",
    ):
        assert part in text, text


def test_refusal_names_the_worst_tier_and_mentions_the_others() -> None:
    ledger = Ledger(lines=(*LEDGER.lines, line(Tier.GPU, "logits", 100)), budgets=LEDGER.budgets)
    with pytest.raises(DoesNotFit, match=r"of GPU.*RAM is short by 20\.0 GiB too"):
        ledger.require_fit("gpt-13b")


def test_ledger_within_its_budgets_is_not_refused() -> None:
    Ledger(lines=LEDGER.lines, budgets={Tier.RAM: 200 * GIB}).require_fit("gpt-13b")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", 10**30])
@pytest.mark.parametrize("name", ["batch", "sequence"])
def test_batch_and_sequence_are_whole_numbers_of_one_or_more(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        Workload(**{"batch": 8, "sequence": 1024, name: value})  # type: ignore[arg-type]


def test_batch_that_does_not_divide_offers_the_nearest_that_do() -> None:
    with pytest.raises(ConfigError, match="8 or 12"):
        Workload(batch=10, sequence=16).batch_per_gpu(4)
    with pytest.raises(ConfigError, match="4 or 4"):
        Workload(batch=1, sequence=16).batch_per_gpu(4)
    assert Workload(batch=12, sequence=16).batch_per_gpu(4) == 3
    assert Workload(batch=12, sequence=16).num_tokens == 192
