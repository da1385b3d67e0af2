"""Micro-batches are dealt to groups, not to ranks."""

import pytest

from lohan.errors import ConfigError
from lohan.parallel.peers import Peers, groups_of, in_turn


@pytest.mark.parametrize("count", range(1, 12))
def test_ranks_have_the_groups_that_one_would(count: int) -> None:
    alone = groups_of([count], 0, 4)
    assert alone == [number % 4 for number in range(count)]
    for num_ranks in (2, 4):
        counts = [len(range(rank, count, num_ranks)) for rank in range(num_ranks)]
        assert in_turn([groups_of(counts, rank, 4) for rank in range(num_ranks)]) == alone


def test_another_share_is_refused_with_the_rank() -> None:
    with pytest.raises(ConfigError, match="rank 0 has 1 micro-batches, and 2 are its share of the"):
        groups_of([1, 3], 1, 2)


def test_alone_everything_is_about_this_process() -> None:
    peers = Peers.join()
    assert (peers.rank, peers.num_ranks, peers.num_here) == (0, 1, 1)
    assert peers.share("word", what="words") == ["word"]
    assert peers.from_first(lambda: 3, what="a number") == 3
    assert peers.together(lambda: 4, what="a number") == 4
    peers.refuse_difference({"words": "same"})
    peers.tell_failure(ValueError())
    peers.leave()
