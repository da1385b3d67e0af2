"""The loss of a step over its micro-batches: who counts how much.

Owns the weights that make a step's loss the mean over all its tokens, however they are dealt out
to micro-batches, and dynamic loss scaling for fp16. Called by the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lohan.errors import ConfigError

IGNORED_LABEL = -100
_FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000
_SMALLEST_SCALE = 2.0**-14


def loss_weights(
    batches: Sequence[Any], given: Sequence[float] | None, *, is_causal: bool
) -> list[float]:
    """What the loss of each micro-batch is multiplied by.

    Where batches have `labels`, its share of the tokens that count; else equal shares.

    Raises:
        ConfigError: the weights given are not one per micro-batch, or no token counts.
    """
    if given is not None:
        if len(given) != len(batches):
            raise ConfigError(
                f"{len(given)} loss weights were given for {len(batches)} micro-batches",
                why="each micro-batch needs one",
                remedy="give as many weights as micro-batches, or none",
            )
        return [float(weight) for weight in given]
    counts = [num_counted_tokens(batch, is_causal=is_causal) for batch in batches]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return [1.0 / len(batches)] * len(batches)
    total = sum(known)
    if not total:
        raise ConfigError(
            f"no token of the step's {len(batches)} micro-batches counts for the loss",
            why=f"all labels are {IGNORED_LABEL}: the mean over no tokens is not a number",
            remedy="check that the data is not cut off before its answers, and the loss mask",
        )
    return [count / total for count in known]


def counted_losses(
    found: Sequence[torch.Tensor], weights: Sequence[float], scale: float | None
) -> tuple[float, ...]:
    """Weighted losses as numbers, without the loss scale. One that counts for nothing is nothing,
    also where it is NaN: the mean over no token."""
    return tuple(
        float(loss) / (scale or 1.0) if weight else 0.0
        for loss, weight in zip(found, weights, strict=True)
    )


def num_counted_tokens(batch: Any, *, is_causal: bool) -> int | None:
    """Labels that count; None without labels. A causal model predicts none for the first token."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    if is_causal and labels.dim() >= 2:
        labels = labels[..., 1:]
    return int((labels != IGNORED_LABEL).sum())


def num_tokens(batch: Any) -> int:
    """Tokens of a micro-batch: of its first two-dimensional tensor of whole numbers, or sequences
    where it has none."""
    from lohan.model.trace_ops import tensors_in

    tensors = tensors_in(batch)
    for tensor in tensors:
        if tensor.dim() == 2 and not tensor.is_floating_point():
            return tensor.numel()
    return max((tensor.shape[0] for tensor in tensors if tensor.dim()), default=0)


@dataclass(slots=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling: halved at an overflow, doubled after many steps without one."""

    value: float = _FIRST_SCALE
    num_good: int = 0

    def update(self, *, is_overflow: bool) -> None:
        """A step has ended.

        Raises:
            ConfigError: the scale has become so small that overflows have another cause.
        """
        if not is_overflow:
            self.num_good += 1
            if self.num_good >= _GROWTH_STEPS:
                self.value, self.num_good = self.value * 2, 0
            return
        self.value, self.num_good = self.value / 2, 0
        if self.value < _SMALLEST_SCALE:
            raise ConfigError(
                f"the loss scale has fallen to {self.value:g}",
                why="gradients overflow in fp16 however small the loss is made",
                remedy="lower the learning rate, look at the data, or train in bf16",
            )


Progress = Callable[[str], None]
