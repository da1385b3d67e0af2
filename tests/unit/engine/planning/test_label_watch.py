"""Which labels count, as the losses of many models say it: judged by the concatenated batch."""

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional

from lohan.drive.micro_batch import loss_of
from lohan.engine.loss import Labels, loss_weights
from lohan.engine.planning.traced_model import TracedModel
from lohan.errors import ConfigError
from support import tiny_models
from support.loss_families import FAMILIES

# Of "answers" the positions are no `labels`, and count alike.
NAMES = [name for name in FAMILIES if "smoothed" not in name and name != "answers"]


def micro_batches(name: str) -> list[dict[str, torch.Tensor]]:
    """Of one, three and two rows."""
    draw = torch.Generator().manual_seed(3)
    rows = [FAMILIES[name].row(draw) for _ in range(6)]
    if rows[0]["labels"].dim():
        rows[0]["labels"][:5] = -100 if rows[0]["labels"].dtype is torch.long else 0
    return [
        {key: torch.stack([row[key] for row in group]) for key in group[0]}
        for group in (rows[:1], rows[1:4], rows[4:])
    ]


def traced(model: torch.nn.Module, example: Any) -> TracedModel:
    return TracedModel(
        model, dtype=torch.bfloat16, device=torch.device("cpu"), example=example, loss_fn=None
    )


def weights_of(model: torch.nn.Module, batches: list[Any], loss_fn: Any = None) -> list[float]:
    watched = traced(model, batches[0])
    return loss_weights(
        [Labels.of(batch) for batch in batches],
        None,
        counts_first_label=lambda: watched.counts_first_label(batches[0], loss_fn),
    )


def assert_as_concatenated(
    model: torch.nn.Module, batches: list[Any], weights: list[float], loss_fn: Any = None
) -> None:
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    with torch.no_grad():
        parts = [w * loss_of(model, b, loss_fn) for w, b in zip(weights, batches, strict=True)]
        together = loss_of(model, whole, loss_fn)
    # fp32 sums in another order; a wrong share is off by a percent.
    torch.testing.assert_close(torch.stack(parts).sum(), together, rtol=1e-5, atol=0)


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[name].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)  # rows with losses that differ much
    return model


@pytest.mark.parametrize("name", NAMES)
def test_the_weighted_sum_is_the_loss_of_the_concatenated_batch(name: str) -> None:
    model, batches = made(name), micro_batches(name)
    assert_as_concatenated(model, batches, weights_of(model, batches))


def shifted_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def test_a_loss_of_the_users_is_looked_at_not_the_model() -> None:
    model, batches = made("masked"), micro_batches("masked")
    weights = weights_of(model, batches, shifted_loss)
    assert weights != weights_of(model, batches)
    assert_as_concatenated(model, batches, weights, shifted_loss)


def either_loss(shifts: bool, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    if shifts:
        return shifted_loss(model, batch)
    return loss_of(model, batch, None)


class EitherLoss:
    def __init__(self, shifts: bool) -> None:
        self.shifts = shifts

    def __call__(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return either_loss(self.shifts, model, batch)


def closed_over(shifts: bool) -> Any:
    return lambda model, batch: either_loss(shifts, model, batch)


@pytest.mark.parametrize(
    "make", [closed_over, EitherLoss, lambda shifts: functools.partial(either_loss, shifts)]
)
def test_losses_of_the_same_code_with_other_settings_are_told_apart(make: Any) -> None:
    model, batches = made("masked"), micro_batches("masked")
    watched = traced(model, batches[0])
    found = [watched.counts_first_label(batches[0], make(shifts)) for shifts in (True, False)]
    assert found == [False, True]


def test_a_loss_made_anew_for_every_step_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = made("masked"), micro_batches("masked")
    watched = traced(model, batches[0])
    found = [watched.counts_first_label(batches[0], closed_over(True))]
    monkeypatch.setattr(watched, "_run", None)
    assert watched.counts_first_label(batches[0], closed_over(True)) is found[0]


def hidden_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return (logits.mean(-1) - batch["labels"]).square().mean()


def masked_by_hand(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch["labels"].clone()
    logits = model(input_ids=batch["input_ids"]).logits
    labels.masked_fill_(batch["input_ids"] == 4, -100)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("loss_fn", [hidden_loss, masked_by_hand])
def test_a_loss_that_cannot_be_followed_asks_for_weights(loss_fn: Any) -> None:
    with pytest.raises(ConfigError, match="not known which labels"):
        weights_of(tiny_models.llama(0.0), micro_batches("llama"), loss_fn)
