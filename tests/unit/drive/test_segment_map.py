"""Segments own parameters where they are first used."""

import pytest
import torch

from lohan.drive import SegmentKind
from lohan.errors import ConfigError
from support.driving_hooks import needed_by
from support.mapped_segments import map_segments
from support.toy_models import SharedBlocks, Toy, ToyBlock


def test_blocks_and_rest_are_laid_out_in_the_order_they_run() -> None:
    segments = map_segments(Toy(lambda _: ToyBlock(), depth=2))
    assert [segment.name for segment in segments] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert [segment.kind for segment in segments] == [
        SegmentKind.REST,
        SegmentKind.BLOCK,
        SegmentKind.BLOCK,
        SegmentKind.REST,
    ]
    assert segments.last.parameters == ("leave.weight", "leave.bias")
    assert needed_by(segments.blocks[1]) == (2,)


def test_a_shared_parameter_belongs_to_its_first_user_and_is_borrowed_by_the_others() -> None:
    segments = map_segments(SharedBlocks())
    first, second, third = segments.blocks
    assert "blocks.0.up.weight" in first.parameters
    assert second.borrowed == third.borrowed == (("blocks.0.up.weight", first.id),)
    assert needed_by(second) == (first.id, second.id)


def test_backward_reaches_from_the_first_trainable_parameter() -> None:
    model = Toy(lambda _: ToyBlock())
    segments = map_segments(model)
    assert segments.with_backward(dict(model.named_parameters())) == {0, 1, 2, 3, 4}
    for parameter in (*model.enter.parameters(), *model.blocks[0].parameters()):
        parameter.requires_grad_(False)
    assert segments.with_backward(dict(model.named_parameters())) == {2, 3, 4}


@pytest.mark.parametrize(
    ("runs", "rest_uses", "message"),
    [
        ([], None, "no repeated block"),
        ([[]], None, "no repeated block"),
        ([["blocks.7"]], None, "no modules"),
        ([["blocks.0", "blocks.1", "blocks.2"]], [[]], "2 rests around them"),
        ([["blocks.0", "blocks.1", "blocks.2"]], [["nothing"], []], "no parameters"),
        ([["blocks.0", "blocks.1", "blocks.2"]], [["enter.bias"], []], "belong to no segment"),
    ],
)
def test_lists_that_do_not_fit_the_model_are_refused(
    runs: list[list[str]], rest_uses: list[list[str]] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        map_segments(Toy(lambda _: ToyBlock()), runs, rest_uses)


def test_a_module_without_a_list_of_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no repeated blocks were found"):
        map_segments(torch.nn.ReLU())
