"""Several processes take every step together: the bits of one process with as many groups.

Ranks are forked (`support.rank_runs`). What every model, option and number of ranks gives is the
long grid of `scripts/ranks`; here one case in which most of it meets, and what is refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fork_server import run_forked
from support.rank_runs import RankRun, as_word, results_of

RESULTS = ("losses", "norms", "masters", "trained", "m", "v", "missed")


def found_by(*runs: RankRun, directory: Path) -> list[list[dict[str, Any]]]:
    """What the ranks of each run found."""
    done = run_forked("support.rank_runs", [str(directory), *map(as_word, runs)])
    return results_of(done.stdout, len(runs))


@pytest.mark.slow
def test_ranks_give_the_bits_of_one_process(tmp_path: Path) -> None:
    run = RankRun(
        model="gpt2",  # the head borrows the embedding
        groups=2,
        max_grad_norm=1.0,
        dropout=0.1,
        freezes=True,
        counts=[3, 1, 4],  # a rank has none in the second step
        resumes_at=2,
        residents=False,
    )
    alone, two = found_by(run, replace(run, num_ranks=2), directory=tmp_path)
    for found in two:
        assert "error" not in found, found["error"]
        assert {name: found[name] for name in RESULTS} == {name: alone[0][name] for name in RESULTS}
    assert sum(found["written_bytes"] for found in two) == alone[0]["written_bytes"]
    assert two[0]["evaluated"] == alone[0]["evaluated"]
    assert len(two[1]["evaluated"]) == 2, "each rank's own batches"
    assert not list(tmp_path.iterdir()), "deleted by every rank"


@pytest.mark.slow
def test_a_run_goes_on_with_as_many_ranks_and_no_other_number(tmp_path: Path) -> None:
    run = RankRun(num_ranks=2, groups=4, counts=[4], keeps=True)
    first = found_by(run, directory=tmp_path)[0]
    run = replace(run, run=first[0]["run"], counts=[4, 4], keeps=False)
    four, one, other_groups, two = found_by(
        replace(run, num_ranks=4, groups=None),
        replace(run, num_ranks=1, groups=None),
        replace(run, groups=2),
        replace(run, groups=None),
        directory=tmp_path,
    )
    for found, ranks in ((four, 4), (one, 1)):
        for rank in found:
            assert f"was made by 2 rank(s), and {ranks} want to go on" in rank["error"]
            assert "archive" in rank["error"]
    assert "reduction_groups is 2, and the run has 4" in other_groups[0]["error"]
    assert [len(rank["losses"]) for rank in two] == [1, 1], "only the second step was left"


@pytest.mark.slow
def test_a_missing_slice_and_ranks_that_do_not_divide_the_groups_are_refused(
    tmp_path: Path,
) -> None:
    run = RankRun(num_ranks=2, counts=[2], keeps=True)
    changing = replace(run, model="counting", keeps=False)
    kept, uneven, changed = found_by(run, replace(run, groups=3), changing, directory=tmp_path)
    for rank in changed:
        assert "a step on 2 ranks changes the buffer num_seen" in rank["error"]
    for rank in uneven:
        assert "2 ranks cannot share 3 reduction group(s) evenly" in rank["error"]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"lohan-{kept[0]['run']}.r{rank}of2" for rank in range(2)
    }
    (tmp_path / f"lohan-{kept[0]['run']}.r1of2" / "manifest.json").unlink()
    again = found_by(replace(run, run=kept[0]["run"]), directory=tmp_path)[0]
    for rank in again:
        assert "has no sealed state" in rank["error"]


@pytest.mark.slow
def test_a_rank_that_is_unlike_the_first_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    unlike: dict[str, dict[str, Any]] = {
        "model": {"freezes": True},
        "settings": {"max_grad_norm": 1.0},
        "options": {"groups": 4},
        "versions": {"version": "9.9"},
    }
    run = RankRun(num_ranks=2, counts=[2])
    runs = [replace(run, unlike=other) for other in unlike.values()]
    for what, ranks in zip(unlike, found_by(*runs, directory=tmp_path), strict=True):
        for rank in ranks:
            assert f"rank 1 has another {what} than rank 0" in rank["error"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_rank_that_is_gone_is_named_by_the_others(how: str, tmp_path: Path) -> None:
    fails = {"rank": 1, "step": 1, "how": how, "timeout_seconds": 3.0}
    other, _ = found_by(RankRun(num_ranks=2, fails=fails), directory=tmp_path)[0]
    assert other["error"].startswith("RankLost: rank 0 waited")
    assert "for the micro-batches of a step: rank 1 does not answer" in other["error"]
