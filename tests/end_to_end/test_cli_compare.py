"""`lohan compare`: all policies side by side."""

from lohan.paper import POLICY_NAMES
from support.command_line import run_lohan

WORDS = ("compare", "gpt-6b", "--machine", "paper-4090", "--batch", 16)


def test_every_policy_is_listed_once_with_speed_or_shortage() -> None:
    fields = run_lohan(*WORDS, "--json").fields
    assert [row["policy"] for row in fields["policies"]] == list(POLICY_NAMES)
    for row in fields["policies"]:
        if row["fits"]:
            assert row["tokens_per_second"] > 0
            assert row["clips_gradients"] is False
            dollars = row["tokens_per_second"] / row["tokens_per_second_per_kdollar"] * 1000
            assert round(dollars) == fields["price_dollars"]
        else:
            assert row["shortages"]
    best = fields["best_baseline"]
    by_name = {row["policy"]: row for row in fields["policies"]}
    assert by_name[best]["speedup_over_best_baseline"] == 1
    assert by_name["lohan+"]["speedup_over_best_baseline"] > 1


def test_table_says_simulated_and_that_nothing_is_clipped() -> None:
    ran = run_lohan(*WORDS)
    assert ran.exit_code == 0
    assert "simulated" in ran.stdout
    assert "without gradient clipping" in ran.stdout
    assert "Does not fit" in ran.stdout
    for policy in POLICY_NAMES:
        assert policy in ran.stdout


def test_chosen_policies_only_in_the_order_asked() -> None:
    fields = run_lohan(*WORDS, "--policies", "zero-infinity, lohan,lohan", "--json").fields
    assert [row["policy"] for row in fields["policies"]] == ["zero-infinity", "lohan"]


def test_best_batch_is_at_least_as_fast_as_any_given_one() -> None:
    names = ("--policies", "lohan,zero-infinity", "--json")
    given = run_lohan(*WORDS, *names).fields["policies"]
    best = run_lohan(*WORDS, *names, "--best-batch").fields["policies"]
    for one, other in zip(given, best, strict=True):
        assert other["tokens_per_second"] >= one["tokens_per_second"]


def test_nothing_fitting_is_a_plain_answer() -> None:
    ran = run_lohan(*WORDS, "--gpu", "1MiB", "--best-batch", "--policies", "lohan,gpu-only")
    assert ran.exit_code == 0
    assert "No policy fits." in ran.stdout
    assert "none of the published baselines compared here fits" in ran.stdout
