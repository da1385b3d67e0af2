"""Sums over groups: fp32, in order, of those that have a gradient."""

import torch

from lohan.parallel.exchange import places_of_groups
from lohan.parallel.folding import fold
from lohan.store import StateLayout, TensorEntry

NAMES = ("a", "b", "c")
LAYOUT = StateLayout.pack({"only": tuple(TensorEntry(name=n, shape=(40,)) for n in NAMES)})
BLOCK = LAYOUT.blocks[0]


def groups_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BLOCK.num_trainable, generator=generator).bfloat16() for _ in range(count)]


def test_groups_are_added_in_their_order_in_fp32() -> None:
    groups = groups_of(4)
    target = torch.full((BLOCK.num_trainable,), torch.nan)
    fold(target, groups, [frozenset()] * 4, BLOCK)
    expected = groups[0].float()
    for one in groups[1:]:
        expected = expected + one.float()
    assert torch.equal(target, expected)
    assert not torch.equal(target, sum(groups[1:], groups[0]).float()), "16 bits would not do"


def test_a_group_without_a_gradient_adds_nothing_not_even_zero() -> None:
    groups = [torch.full((BLOCK.num_trainable,), -0.0, dtype=torch.bfloat16) for _ in range(3)]
    groups[1].fill_(0.0)
    target = torch.full((BLOCK.num_trainable,), torch.nan)
    fold(target, groups, [None, frozenset({"b"}), frozenset({"a", "b"})], BLOCK)
    of_a, of_b, of_c = (target[place.begin : place.end] for place in BLOCK.places)
    assert not of_a.signbit().any(), "the zero of the second group alone"
    assert torch.equal(of_b, torch.zeros(40)), "nobody has one"
    assert not of_c.signbit().any(), "0.0 + -0.0 is 0.0"
    fold(target, groups, [frozenset(), frozenset(NAMES), frozenset(NAMES)], BLOCK)
    assert target.signbit().all(), "-0.0 alone stays so"


def test_slices_of_groups_lie_beside_those_of_other_ranks() -> None:
    assert places_of_groups(1, 100, 3) == [0, 100, 200]
    assert places_of_groups(2, 100, 2) == [0, 50]
    # Two ranks of two groups: what was sent first came from groups 0 and 1.
    assert places_of_groups(2, 100, 4) == [0, 50, 100, 150]
