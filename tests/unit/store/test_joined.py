"""Slices of ranks are put together in an order that every rank keeps."""

from pathlib import Path

from lohan.store.masters import _merged
from lohan.store.seals.commits import name_of_rank, num_ranks_of, run_of


def test_names_keep_the_order_of_all_lists() -> None:
    # Trained tensors are cut by themselves and frozen ones too: b and f lie on both ranks.
    assert list(_merged([["a", "b", "f"], ["b", "c", "f", "g"]])) == [
        ("a", [0]),
        ("b", [0, 1]),
        ("c", [1]),
        ("f", [0, 1]),
        ("g", [1]),
    ]
    assert list(_merged([["a"], []])) == [("a", [0])]


def test_directories_say_of_which_run_they_are(tmp_path: Path) -> None:
    assert run_of(name_of_rank("12ab", 3, 16)) == ("12ab", 16)
    assert run_of(name_of_rank("12ab", 0, 1)) == ("12ab", 1)
    assert num_ranks_of([tmp_path], "12ab") == 1
    (tmp_path / "lohan-12ab.r0of2").mkdir()
    (tmp_path / "lohan-12abc.r0of4").mkdir()
    assert num_ranks_of([tmp_path], "12ab") == 2
