"""Weights of micro-batches: a step's loss is that of all its tokens together."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lohan.engine import loss
from lohan.engine.loss import Labels, LossScale, counted_losses, num_tokens
from lohan.errors import ConfigError


def batch(*counts: int, length: int = 8) -> dict[str, torch.Tensor]:
    """Rows whose first `count` labels do not count."""
    labels = torch.arange(len(counts) * length).reshape(len(counts), length)
    for row, count in enumerate(counts):
        labels[row, :count] = -100
    return {"input_ids": torch.zeros_like(labels), "labels": labels}


def loss_weights(
    batches: Sequence[Any],
    given: Sequence[float] | None,
    *,
    counts_first_label: Callable[[], bool | None],
) -> list[float]:
    labels = [Labels.of(one) for one in batches]
    return loss.loss_weights(labels, given, counts_first_label=counts_first_label)


def shifted() -> bool:
    """A model that predicts the next token."""
    return False


def aligned() -> bool:
    return True


def test_weights_are_shares_of_the_labels_that_count() -> None:
    parts = [batch(0), batch(4), batch(8)]
    assert loss_weights(parts, None, counts_first_label=shifted) == [7 / 11, 4 / 11, 0.0]
    assert loss_weights(parts, None, counts_first_label=aligned) == [8 / 12, 4 / 12, 0.0]


def test_where_all_first_labels_are_left_out_nobody_is_asked() -> None:
    def ask() -> bool:
        raise AssertionError

    assert loss_weights([batch(1), batch(4)], None, counts_first_label=ask) == [7 / 11, 4 / 11]
    assert loss_weights([batch(0), batch(0)], None, counts_first_label=ask) == [0.5, 0.5]


def test_a_loss_that_cannot_be_seen_is_refused_where_it_matters() -> None:
    with pytest.raises(ConfigError, match="not known which labels"):
        loss_weights([batch(0), batch(4)], None, counts_first_label=lambda: None)


def test_numbers_to_predict_all_count() -> None:
    parts = [{"labels": torch.zeros(3)}, {"labels": torch.zeros(1)}]
    assert loss_weights(parts, None, counts_first_label=aligned) == [0.75, 0.25]


def test_what_is_divided_by_the_items_of_the_step_adds_up() -> None:
    parts = [{**batch(0), "num_items_in_batch": 12}, {**batch(4), "num_items_in_batch": 12}]
    assert loss_weights(parts, None, counts_first_label=aligned) == [1.0, 1.0]


def test_the_weighted_sum_is_the_loss_of_the_concatenated_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 8, 11, dtype=torch.float64)
    parts = [batch(2), batch(5), batch(0)]

    def mean_loss(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(
            rows[:, :-1].reshape(-1, 11),
            (labels[:, 1:] % 11).where(labels[:, 1:] >= 0, -100).reshape(-1),
        )

    weights = loss_weights(parts, None, counts_first_label=shifted)
    ours = sum(
        weight * mean_loss(logits[i : i + 1], part["labels"])
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True))
    )
    whole = mean_loss(logits, torch.cat([part["labels"] for part in parts]))
    # fp64 sums in another order.
    assert torch.isclose(torch.as_tensor(ours), whole, rtol=1e-12)


def test_without_labels_micro_batches_count_alike() -> None:
    assert loss_weights([{"x": torch.zeros(2)}] * 4, None, counts_first_label=shifted) == [0.25] * 4


def test_a_step_without_any_token_to_learn_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="no token"):
        loss_weights([batch(8)], None, counts_first_label=shifted)


def test_weights_must_be_one_per_micro_batch() -> None:
    with pytest.raises(ConfigError, match="2 loss weights were given for 1"):
        loss_weights([batch(0)], [0.5, 0.5], counts_first_label=shifted)


def test_losses_are_told_without_their_scale() -> None:
    found = [torch.tensor(2.0), torch.tensor(6.0)]
    assert counted_losses(found, [0.25, 0.75], None) == (2.0, 6.0)
    assert counted_losses(found, [0.25, 0.75], 4.0) == (0.5, 1.5)


def test_the_mean_over_no_token_counts_for_nothing() -> None:
    assert counted_losses([torch.tensor(float("nan")), torch.ones(())], [0.0, 1.0], None) == (0, 1)


def test_tokens_are_those_of_the_first_table_of_whole_numbers() -> None:
    assert num_tokens(batch(0, 1)) == 16
    assert num_tokens({"pixels": torch.zeros(5, 3, 2)}) == 5


def test_the_loss_scale_halves_at_overflows_and_grows_after_many_good_steps() -> None:
    scale = LossScale(value=8.0)
    scale.update(is_overflow=True)
    assert scale.value == 4.0
    for _ in range(2000):
        scale.update(is_overflow=False)
    assert (scale.value, scale.num_good) == (8.0, 0)
    tiny = LossScale(value=2.0**-14)
    with pytest.raises(ConfigError, match="loss scale has fallen"):
        tiny.update(is_overflow=True)
