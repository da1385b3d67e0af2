"""Tokens that a model's embedding does not have are named by their row, before all else."""

import datasets
import pytest

from lohan.errors import ConfigError
from lohan.train.trainer.largest_batch import refuse_unknown_tokens
from support import tiny_chat


def test_the_row_with_a_token_the_model_does_not_have_is_named() -> None:
    model = tiny_chat.model()
    rows = [[1, 2], [], [299], [3, 300, 4], [301]]
    table = datasets.Dataset.from_dict({"input_ids": rows})
    with pytest.raises(ConfigError, match="row 4 of the training rows has the token 300") as error:
        refuse_unknown_tokens(table, model, what="training")
    assert "300 tokens" in error.value.why
    refuse_unknown_tokens(table.select(range(3)), model, what="training")
    with pytest.raises(ConfigError, match=r"row 2 .* has the token -1"):
        refuse_unknown_tokens(
            datasets.Dataset.from_dict({"input_ids": [[1], [-1]]}), model, what="training"
        )


def test_marks_of_pictures_are_the_models_own_business() -> None:
    model = tiny_chat.model()
    model.config.image_token_id = 300
    refuse_unknown_tokens(
        datasets.Dataset.from_dict({"input_ids": [[1, 300]]}), model, what="training"
    )
