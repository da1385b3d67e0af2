"""First values that are no numbers are refused by the name of their tensor."""

import pytest
import torch

from lohan.engine.run_setup import initial_tensors
from lohan.errors import ConfigError


def test_nan_and_infinite_values_are_named_as_they_are_read() -> None:
    model = torch.nn.Linear(3, 2)
    assert [name for name, _ in initial_tensors(model, None)] == ["weight", "bias"]
    model.weight.data[1, 1] = float("inf")
    with pytest.raises(ConfigError, match="6 values of the tensor weight 0 are NaN and 1 infinite"):
        list(initial_tensors(model, None))
    model.weight.requires_grad_(False)  # a mask, say
    list(initial_tensors(model, None))
    given = [("weight", torch.tensor([1.0, float("nan")]))]
    with pytest.raises(ConfigError, match="2 values of the tensor weight 1 are NaN"):
        list(initial_tensors(model, iter(given)))
