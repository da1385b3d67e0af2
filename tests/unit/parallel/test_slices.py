"""Slices of ranks: every position once, tensors cut with them."""

import itertools

import pytest
import torch

from lohan.parallel.slices import SLICE_STEP, Slice, slice_length
from lohan.store import StateLayout, TensorEntry

SIZES = [0, 1, SLICE_STEP - 1, SLICE_STEP, SLICE_STEP + 1, 5 * SLICE_STEP + 7, 8 * SLICE_STEP]


def layout_of(*shapes: tuple[int, ...], frozen: int = 3) -> StateLayout:
    """Every third tensor is frozen."""
    entries = tuple(
        TensorEntry(name=f"t{number}", shape=shape, is_trainable=number % frozen != frozen - 1)
        for number, shape in enumerate(shapes)
    )
    return StateLayout.pack({"only": entries})


@pytest.mark.parametrize("num_positions", SIZES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_slices_follow_each_other_and_cover_all(num_positions: int, num_ranks: int) -> None:
    found = [Slice(rank=r, num_ranks=num_ranks).of(num_positions) for r in range(num_ranks)]
    assert found[0][0] == 0
    assert found[-1][1] == num_positions
    for (_, end), (begin, _) in itertools.pairwise(found):
        assert begin == end
    for begin, end in found:
        assert begin % SLICE_STEP == 0 or begin == num_positions
        assert end - begin <= slice_length(num_positions, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_stores_its_positions_and_no_others(num_ranks: int) -> None:
    whole = layout_of((70, 80), (5000,), (90, 90), (3, 1), (0,), (9000,))
    block = whole.blocks[0]
    values = [(e.name, torch.rand(e.shape)) for e in block.tensors]
    parts: dict[str, list[torch.Tensor]] = {name: [] for name, _ in values}
    for rank in range(num_ranks):
        place = Slice(rank=rank, num_ranks=num_ranks)
        own = place.layout(whole).blocks[0]
        for found, wanted in [
            (own.num_trainable, block.num_trainable),
            (own.num_frozen, block.num_frozen),
        ]:
            begin, end = place.of(wanted)
            assert found == end - begin
        cut = dict(place.tensors(whole, values))
        assert {name: tuple(t.shape) for name, t in cut.items()} == {
            entry.name: entry.shape for entry in own.tensors
        }
        for one in own.places:
            _, original = whole.find(one.entry.name)
            if one.begin:
                # Where a tensor begins here it does in the whole block too.
                length = block.num_trainable if one.entry.is_trainable else block.num_frozen
                assert one.begin + place.of(length)[0] == original.begin
            parts[one.entry.name].append(cut[one.entry.name])
    for name, value in values:
        again = torch.cat(parts[name]) if parts[name] else torch.zeros(0)
        assert torch.equal(again, value.reshape(-1))


def test_what_is_not_of_the_model_is_left_to_be_refused() -> None:
    whole = layout_of((70, 80), (5000,))
    given = [("other", torch.zeros(2)), ("t0", torch.zeros(80, 70))]
    found = dict(Slice(rank=1, num_ranks=2).tensors(whole, given))
    assert found["other"].shape == (2,)
    assert found["t0"].shape == (80, 70)


def test_moments_are_cut_as_their_tensors() -> None:
    whole, place = layout_of((3 * SLICE_STEP,)), Slice(rank=1, num_ranks=2)
    cut = place.moments(whole, lambda _: (torch.arange(12288.0), -torch.arange(12288.0)))
    assert cut is not None
    first, second = cut("t0")
    assert first.tolist() == list(range(2 * SLICE_STEP, 3 * SLICE_STEP))
    assert torch.equal(second, -first)
    assert place.moments(whole, None) is None
