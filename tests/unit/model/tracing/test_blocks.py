import pytest
import torch
from torch import nn

from lohan.errors import ConfigError
from lohan.model.tracing.blocks import find_blocks, structure_of
from support.small_modules import WIDTH, Mix, Model, mixes


def names(model):
    return [block.name for block in find_blocks(model)]


def test_members_of_the_list_are_the_blocks():
    model = Model(mixes(3))
    found = find_blocks(model)
    assert [block.name for block in found] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [block.module for block in found] == list(model.blocks)
    assert {block.list_name for block in found} == {"blocks"}
    assert [block.is_last for block in found] == [False, False, True]


def test_a_run_in_a_sequential_is_a_list_too():
    model = Model([nn.Linear(WIDTH, WIDTH), *mixes(3), nn.LayerNorm(WIDTH)], nn.Sequential)
    assert names(model) == ["blocks.1", "blocks.2", "blocks.3"]


def test_lists_inside_a_block_belong_to_the_block():
    def outer():
        return nn.Sequential(Mix(), nn.Linear(WIDTH, WIDTH), Mix(), Mix())

    assert names(Model([outer(), outer()])) == ["blocks.0", "blocks.1"]


def test_an_encoder_and_a_decoder_are_two_lists():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Model(mixes(2)), Model(mixes(3))

    found = find_blocks(Both())
    assert [block.list_name for block in found] == ["encoder.blocks"] * 2 + ["decoder.blocks"] * 3


def test_a_small_list_beside_the_main_one_is_not_cut():
    model = Model([Mix(512) for _ in range(3)])
    model.adapters = nn.ModuleList(mixes(2))
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2"]


def test_blocks_of_different_classes_in_one_list_are_blocks():
    class Other(Mix):
        pass

    assert len(find_blocks(Model([Mix(), Other(), Mix()]))) == 3


def test_a_single_block_will_do_where_nothing_repeats():
    assert names(Model(mixes(1))) == ["blocks.0"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        Model([nn.Linear(WIDTH, WIDTH), nn.ReLU()]),
        Model([]),
    ],
    ids=["leaf", "plain layers", "no submodules", "empty list"],
)
def test_a_small_model_without_blocks_is_one(model):
    (block,) = find_blocks(model)
    assert block.module is model
    assert block.is_last


@pytest.mark.parametrize("model", [nn.Linear(20_000, 20_000, device="meta"), nn.ReLU()])
def test_a_large_model_without_blocks_is_refused_with_what_was_looked_for(model):
    with pytest.raises(ConfigError, match="no repeated blocks were found") as raised:
        find_blocks(model)
    assert "ModuleList" in raised.value.why


def structures(model):
    return [structure_of(block) for block in find_blocks(model)]


def test_equal_blocks_have_equal_structure_in_spite_of_their_index():
    first, second, third = structures(Model(mixes(3)))
    assert first == second == third


@pytest.mark.parametrize("what", ["frozen", "wider", "setting", "dtype", "offset"])
def test_structure_tells_blocks_apart(what):
    model = Model(mixes(2))
    block = model.blocks[1]
    if what == "frozen":
        block.fc.bias.requires_grad_(False)
    elif what == "wider":
        block.fc = nn.Linear(WIDTH, 2 * WIDTH)
    elif what == "setting":
        block.is_sliding = True
    elif what == "dtype":
        block.fc.to(torch.float64)
    else:
        block.layer_idx = 7
    first, second = structures(model)
    assert first != second


def test_a_rate_that_differs_by_layer_does_not_tell_blocks_apart():
    model = Model(mixes(3))
    for block, rate in zip(model.blocks, (0.1, 0.2, 0.0), strict=True):
        block.drop_rate = rate
    first, second, third = structures(model)
    assert first == second != third
