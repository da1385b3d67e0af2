"""Sizes of batches: what counts sequences, and what is the same for all of them."""

import pytest
import torch

from lohan.engine.planning.traced_model import TracedModel, sizes_of
from lohan.errors import ConfigError
from lohan.model.tracing.trace_model import TraceableModel
from support.tiny_models import TINY_MODELS


def test_the_first_dimension_of_most_tensors_counts_sequences() -> None:
    image = {
        "hidden_states": torch.zeros(2, 16, 8),
        "timestep": torch.zeros(2),
        "nested": {"img_ids": torch.zeros(16, 3)},
    }
    assert sizes_of([image]).micro_batch == 2


def test_the_longest_tokens_and_the_most_sequences_of_a_step_count() -> None:
    sizes = sizes_of(
        [
            {"input_ids": torch.zeros(2, 7, dtype=torch.long), "scale": torch.tensor(1.0)},
            {"input_ids": torch.zeros(3, 5, dtype=torch.long)},
        ]
    )
    assert (sizes.num_micro_batches, sizes.micro_batch, sizes.sequence) == (2, 3, 7)


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensors"):
        sizes_of([{"text": "none"}])


def batch_with(mask: list[int] | None) -> dict[str, torch.Tensor]:
    made = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    return made if mask is None else {**made, "attention_mask": torch.tensor([mask])}


def test_a_plan_without_masks_does_not_cover_padded_batches() -> None:
    plain, ones = sizes_of([batch_with(None)]), sizes_of([batch_with([1, 1, 1, 1])])
    padded = sizes_of([batch_with([1, 1, 1, 1]), batch_with([1, 1, 0, 0])])
    assert plain == ones
    assert padded.is_padded
    assert padded.covers(ones)
    wider = sizes_of([batch_with(None)] * 2)
    assert not wider.covers(padded)
    assert wider.with_room_for(padded).covers(padded)


def test_masks_of_padded_batches_are_counted() -> None:
    model = TINY_MODELS["llama"].build(0.0).to(torch.bfloat16)
    whole = TINY_MODELS["llama"].batch(0, torch.bfloat16)
    mask = torch.ones_like(whole["input_ids"])
    batches = [{**whole, "attention_mask": mask}, {**whole, "attention_mask": mask.clone()}]
    traced = TracedModel(
        model, dtype=torch.bfloat16, device=torch.device("cpu"), example=batches[0], loss_fn=None
    )

    def side_bytes() -> int:
        sizes = sizes_of(batches)
        shape = traced.shape(sizes, batches)
        at = (sizes.micro_batch, sizes.sequence)
        return sum(kind.side_bytes.at(*at) for kind in shape.blocks)

    without = side_bytes()
    batches[1]["attention_mask"][0, -2:] = 0
    length = mask.shape[1]
    assert side_bytes() >= without + mask.shape[0] * length * length


@pytest.mark.parametrize(
    ("change", "num_runs"),
    [
        ({}, 0),
        ({"attention_mask": torch.ones(2, 16, dtype=torch.long)}, 1),
        ({"attention_mask": torch.zeros(2, 16, dtype=torch.long)}, 1),
        ({"input_ids": torch.zeros(2, 20, dtype=torch.long)}, 1),
        ({"output_attentions": False}, 1),
        ({"scale": torch.tensor(1.0)}, 1),
    ],
)
def test_a_model_is_run_again_only_for_batches_unlike_the_example(
    change: dict[str, object], num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    example: dict[str, object] = {"input_ids": tokens, "labels": tokens}

    def traced(batch: dict[str, object]) -> TracedModel:
        model = TINY_MODELS["llama"].build(0.0).to(torch.bfloat16)
        return TracedModel(
            model,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            example=batch,
            loss_fn=lambda model, inputs: model(input_ids=inputs["input_ids"]).logits.sum(),
        )

    made, points, run = traced(example), [], TraceableModel.run
    monkeypatch.setattr(
        TraceableModel,
        "run",
        lambda self, make, point: points.append(point) or run(self, make, point),
    )
    batch = {**example, **change}
    shape = made.shape(sizes_of([batch]), [batch])
    assert len(points) == num_runs
    assert shape == traced(batch).shape(sizes_of([batch]), [batch])
