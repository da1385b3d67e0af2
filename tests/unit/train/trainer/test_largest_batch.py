"""Tokens that a model's embedding does not have are named by their row, before all else."""

import datasets
import pytest

from lohan.errors import ConfigError
from lohan.train.data.dataset import hash_rows
from lohan.train.trainer.largest_batch import longest_rows, refuse_unknown_tokens
from support import tiny_chat, tiny_vision


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


def test_a_model_without_an_embedding_has_no_unknown_tokens() -> None:
    class WithoutEmbedding:
        def get_input_embeddings(self) -> None:
            raise NotImplementedError("as transformers says it")

    refuse_unknown_tokens(
        datasets.Dataset.from_list([{"input_ids": [1000]}]), WithoutEmbedding(), what="training"
    )


def test_a_table_of_pictures_is_planned_for_by_the_rows_with_most_of_them() -> None:
    table = tiny_vision.rows([0, 1, 0, 3, 2])
    found = longest_rows(table, 2)
    assert found is not None
    assert [len(row["images"]) for row in found] == [3, 2]
    part = longest_rows(table.select([4, 0, 1]), 2)
    assert part is not None
    assert [len(row["images"]) for row in part] == [2, 1]
    single = datasets.Dataset.from_dict({"image": ["a", "b", "c"], "text": ["", "", ""]})
    assert longest_rows(single, 2) is not None
    assert longest_rows(single.select_columns("text"), 2) is None


def test_another_picture_makes_other_rows() -> None:
    one, other = tiny_vision.rows([1, 0]), tiny_vision.rows([1, 0], seed=1)
    same_words = other.remove_columns("messages").add_column("messages", one["messages"])
    assert hash_rows(one, ("images",)) != hash_rows(same_words, ("images",))
    assert hash_rows(one, ("images",)) == hash_rows(tiny_vision.rows([1, 0]), ("images",))
