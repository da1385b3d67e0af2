"""Whose losses cannot be computed in chunks."""

from types import SimpleNamespace
from typing import Any

import pytest

from lohan.errors import ConfigError
from lohan.train.settings.arguments import refuse_chunked_loss
from lohan.train.trainer.trainer import SFTTrainer


def trainer(*, compute_loss_func: Any = None, label_smoothing_factor: float = 0.0) -> Any:
    return SimpleNamespace(
        compute_loss_func=compute_loss_func,
        args=SimpleNamespace(label_smoothing_factor=label_smoothing_factor),
    )


def test_losses_of_trl_and_of_all_logits_are_refused() -> None:
    refuse_chunked_loss(trainer())
    with pytest.raises(ConfigError, match="label smoothing"):
        refuse_chunked_loss(trainer(label_smoothing_factor=0.1))
    with pytest.raises(ConfigError, match="compute_loss_func"):
        refuse_chunked_loss(trainer(compute_loss_func=print))
    with pytest.raises(ConfigError, match="TRL computes the loss of SFTTrainer itself"):
        refuse_chunked_loss(SFTTrainer.__new__(SFTTrainer))
