import dataclasses
import json

import pytest

from lohan.errors import ConfigError
from lohan.model import INPUT, BlockShape, Growth, ModelShape, OperatorShape

ATTENTION = OperatorShape(
    index=3,
    name="attention/sdpa",
    inputs=(INPUT,),
    output_bytes=Growth(per_token=6),
    forward_flops=Growth(per_token_pair=5),
    backward_flops=Growth(per_token_pair=10),
    is_saved=True,
)
DROPOUT = OperatorShape(
    index=5,
    name="dropout/native_dropout",
    inputs=(3,),
    output_bytes=Growth(per_token=3),
    touched_bytes=Growth(per_token=9),
    is_saved=True,
    partly_saved_bytes=Growth(per_token=1),
)
UNSAVED = dataclasses.replace(DROPOUT, index=7, is_saved=False, partly_saved_bytes=None)
BLOCK = BlockShape(
    name="block",
    num_parameters=100,
    num_frozen_parameters=40,
    operators=(ATTENTION, DROPOUT, UNSAVED),
    input_bytes=Growth(per_token=2),
    output_bytes=Growth(per_token=2),
)
END = BlockShape(name="end", num_parameters=7)
MODEL = ModelShape(
    name="tiny",
    kinds=(END, BLOCK),
    sequence_of_kinds=(0, 1, 1, 0),
    tied=((0, 3, 5),),
    nominal_parameters=2e2,
)


def test_growth_is_exact_beyond_the_precision_of_a_float():
    growth = Growth(
        fixed=1,
        per_sequence=3,
        per_token=10**18 + 1,
        per_token_pair=7,
        shared_per_token=11,
        shared_per_token_pair=13,
    )
    assert growth.at(3, 5) == 1 + 3 * (3 + 5 * (10**18 + 1) + 7 * 25) + 11 * 5 + 13 * 25


def test_growths_add_by_coefficient():
    first = Growth(fixed=1, per_token=2, shared_per_token_pair=6)
    second = Growth(per_token=3, per_token_pair=4, per_sequence=5, shared_per_token=7)
    assert Growth.total([first, second]) == Growth(
        fixed=1,
        per_sequence=5,
        per_token=5,
        per_token_pair=4,
        shared_per_token=7,
        shared_per_token_pair=6,
    )
    assert Growth.total([]) == Growth()


def test_a_block_sums_its_operators():
    assert BLOCK.forward_flops == Growth(per_token_pair=5)
    assert BLOCK.backward_flops == Growth(per_token_pair=10)


def test_saved_bytes_count_only_the_outputs_that_are_kept():
    assert BLOCK.saved_bytes == Growth(per_token=6 + 1)


def test_a_model_expands_its_kinds():
    assert MODEL.blocks == (END, BLOCK, BLOCK, END)
    assert MODEL.num_blocks == 4
    assert MODEL.num_parameters == 214


def test_json_round_trip_is_exact():
    text = MODEL.to_json()
    assert ModelShape.from_json(text) == MODEL
    assert ModelShape.from_json(text).to_json() == text


def test_json_carries_a_version():
    assert json.loads(MODEL.to_json())["version"] == 3


def changed(path, value):
    record = json.loads(MODEL.to_json())
    place = record
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        (changed(["version"], 1), "version is 1"),
        (changed(["version"], ...), "version is missing"),
        (changed(["name"], ...), r"model shape\.name is missing"),
        (changed(["extra"], 1), r'unknown key "extra"'),
        (changed(["dtype_bytes"], ...), r"model shape\.dtype_bytes is missing"),
        (changed(["kinds", 1, "is_rest"], ...), r"kinds\[1\]\.is_rest is missing"),
        (changed(["dtype_bytes"], True), "dtype_bytes is true"),
        (changed(["dtype_bytes"], "2"), 'dtype_bytes is "2"'),
        (changed(["kinds", 0], 5), r"kinds\[0\] is 5.*an object"),
        (
            changed(["kinds", 1, "operators", 0, "output_bytes"], [1] * 7),
            r"operators\[0\]\.output_bytes is .*at most length 6",
        ),
        (changed(["kinds", 1, "operators", 0, "inputs"], ["a"]), r"inputs\[0\] is .*whole number"),
        (changed(["kinds", 1, "operators", 0, "is_saved"], 1), "is_saved is 1"),
        (changed(["tied"], [[1, 2]]), r"tied\[0\] is \[1, 2\].*length 3"),
        (changed(["tied"], [[0, 9, 5]]), "tied names blocks other than 0..3"),
        (changed(["sequence_of_kinds"], [0, 2]), "kinds other than 0..1"),
        (changed(["sequence_of_kinds"], []), "kinds other than"),
    ],
)
def test_json_that_is_not_a_shape_is_refused_with_the_reason(text, reason):
    with pytest.raises(ConfigError, match=reason):
        ModelShape.from_json(text)
