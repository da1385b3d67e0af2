"""The words: one spelling each, usable as text, and stable when stored."""

import json
import pickle
from enum import StrEnum

import pytest

from lohan.vocabulary import Choice, ComputeKind, Lane, TensorKind, Tier

ENUMS: list[type[StrEnum]] = [Tier, TensorKind, Lane, Choice, ComputeKind]


def test_the_words_are_those_of_the_architecture() -> None:
    # Stored in files and typed by users: a change here breaks both.
    assert [str(word) for word in Tier] == ["GPU", "RAM", "SSD"]
    assert [str(word) for word in TensorKind] == ["P16", "G16", "P32", "OS32", "A16"]
    assert [str(word) for word in Lane] == [
        "gpu",
        "gpu_to_ram",
        "ram_to_gpu",
        "ssd_read",
        "ssd_write",
        "cpu",
        "peer",
    ]
    assert [str(word) for word in Choice] == ["keep", "swap_to_ram", "swap_to_ssd", "recompute"]
    assert [str(word) for word in ComputeKind] == [
        "forward",
        "recompute",
        "backward",
        "update",
        "norm",
        "reduce",
    ]


@pytest.mark.parametrize("enum", ENUMS)
def test_a_word_survives_text_json_and_pickle(enum: type[StrEnum]) -> None:
    for word in enum:
        assert word.name == word.value.upper()
        assert enum(str(word)) is word
        assert enum(json.loads(json.dumps(word))) is word
        assert pickle.loads(pickle.dumps(word)) is word
        assert f"{word}" == word.value
    assert enum.__doc__


def test_a_tier_is_not_a_lane() -> None:
    assert not {str(tier) for tier in Tier} & {str(lane) for lane in Lane}
