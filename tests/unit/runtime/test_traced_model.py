"""Sizes of batches: what counts sequences, and what is the same for all of them."""

import pytest
import torch

from lohan.errors import ConfigError
from lohan.runtime.traced_model import sizes_of


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
