"""Micro-batches are dealt to groups, not to ranks."""

import pytest

from lohan.errors import ConfigError
from lohan.parallel.peers import Peers, groups_of, shares_of


def test_groups_get_equal_shares_the_first_ones_one_more() -> None:
    assert shares_of(8, 4) == [2, 2, 2, 2]
    assert shares_of(7, 4) == [2, 2, 2, 1]
    assert shares_of(3, 4) == [1, 1, 1, 0]


@pytest.mark.parametrize("count", range(1, 12))
def test_ranks_have_the_groups_that_one_would(count: int) -> None:
    alone = groups_of([count], 0, 4)
    shares = shares_of(count, 4)
    for num_ranks in (2, 4):
        per_rank = 4 // num_ranks
        counts = [sum(shares[r * per_rank : (r + 1) * per_rank]) for r in range(num_ranks)]
        found = [group for r in range(num_ranks) for group in groups_of(counts, r, 4)]
        assert tuple(found) == alone


def test_another_share_is_refused_with_the_rank() -> None:
    with pytest.raises(ConfigError, match="rank 0 has 1 micro-batches, and 2 are its share of the"):
        groups_of([1, 3], 1, 2)


def test_alone_everything_is_about_this_process() -> None:
    peers = Peers.join()
    assert (peers.rank, peers.num_ranks, peers.num_here) == (0, 1, 1)
    assert peers.share("word", what="words") == ["word"]
    assert peers.from_first(lambda: 3, what="a number") == 3
    assert peers.together(lambda: 4, what="a number") == 4
    peers.refuse_difference("same", what="words")
    peers.tell_failure(ValueError())
    peers.leave()
