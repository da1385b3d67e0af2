import pytest

from lohan.errors import ConfigError
from lohan.model import Growth, recomputation, shape_of

H = 5120
BLOCK = shape_of("gpt-13b").kinds[1]
INDEX = {operator.name: operator.index for operator in BLOCK.operators}
(SDPA,) = (name for name in INDEX if "dot_product" in name)


def names(indices):
    return [operator.name for operator in BLOCK.operators if operator.index in set(indices)]


def test_with_nothing_at_hand_all_but_the_unneeded_is_run_again():
    found = recomputation(BLOCK, ())
    left_out = {operator.index for operator in BLOCK.operators} - set(found.operators)
    assert names(left_out) == ["mlp.fc2/addmm", "add"]
    assert found.flops == Growth(per_token=16 * H**2, per_token_pair=4 * H)


def test_swapping_the_last_projection_saves_nothing():
    assert recomputation(BLOCK, {INDEX["mlp.fc2/addmm"]}) == recomputation(BLOCK, ())


def test_with_everything_saved_at_hand_nothing_is_run_again():
    saved = {operator.index for operator in BLOCK.operators if operator.is_saved}
    found = recomputation(BLOCK, saved)
    assert found.operators == ()
    assert found.flops == Growth()


def test_what_is_at_hand_stops_the_search():
    found = recomputation(BLOCK, {INDEX["attention.qkv/addmm"], INDEX[SDPA]})
    assert INDEX["ln1/native_layer_norm"] in found.operators, "autograd keeps it all the same"
    assert INDEX["attention.qkv/addmm"] not in found.operators
    assert INDEX["attention.proj/addmm"] in found.operators, "the first sum needs it"
    assert found.flops == Growth(per_token=2 * H**2 + 8 * H**2)


def test_operators_come_in_the_order_to_run_them():
    found = recomputation(BLOCK, ())
    assert list(found.operators) == sorted(found.operators)


def test_an_operator_the_block_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"operators \[1, 999\] are not in block 'block'"):
        recomputation(BLOCK, {999, 1})
