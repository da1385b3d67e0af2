"""The loss of a step over its micro-batches: who counts how much.

Owns the weights that make a step's loss that of one batch of all its rows, however they are dealt
out to micro-batches, and dynamic loss scaling for fp16. Called by the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lohan.engine.planning.label_watch import IGNORED_LABEL
from lohan.errors import ConfigError

_FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000
_SMALLEST_SCALE = 2.0**-14


class Labels(NamedTuple):
    """How many labels of a micro-batch count; None where it has none."""

    counted: int | None
    without_first: int | None
    is_divided: bool
    """Whether its loss is divided by what the whole step has."""

    @classmethod
    def of(cls, batch: Any) -> "Labels":
        """Those of a micro-batch."""
        is_divided = isinstance(batch, Mapping) and "num_items_in_batch" in batch
        labels = _labels(batch)
        if labels is None:
            return cls(None, None, is_divided)
        without_first = _num_counted(labels[..., 1:] if labels.dim() > 1 else labels)
        return cls(_num_counted(labels), without_first, is_divided)


def loss_weights(
    batches: Sequence[Labels],
    given: Sequence[float] | None,
    *,
    counts_first_label: Callable[[], bool | None],
) -> list[float]:
    """What the loss of each micro-batch of a step, of all ranks, is multiplied by.

    Where batches have `labels`, its share of those that count; else equal shares. Batches that say
    how many items the step has (transformers' `num_items_in_batch`) are divided by it already.

    Args:
        counts_first_label: whether those of first tokens count, which models that predict the next
            token leave out; None where it is not known. Asked only where it matters.

    Raises:
        ConfigError: the weights given are not one per micro-batch, no label counts, or which ones
            do is not known.
    """
    if given is not None:
        if len(given) != len(batches):
            raise ConfigError(
                f"{len(given)} loss weights were given for {len(batches)} micro-batches",
                why="each micro-batch needs one",
                remedy="give as many weights as micro-batches, or none",
            )
        return [float(weight) for weight in given]
    if all(batch.is_divided for batch in batches):
        return [1.0] * len(batches)
    if any(batch.counted is None for batch in batches):
        return [1.0 / len(batches)] * len(batches)
    shares = _shares([batch.counted or 0 for batch in batches])
    without_first = _shares([batch.without_first or 0 for batch in batches])
    if shares != without_first:
        is_first_counted = counts_first_label()
        if is_first_counted is None:
            raise ConfigError(
                "it is not known which labels of the step's micro-batches count for the loss",
                why="it reads them by no cross entropy of PyTorch, and whether those of first "
                "tokens count makes a difference",
                remedy="give each micro-batch's share of the loss: "
                "engine.step(micro_batches, weights=[...])",
            )
        shares = shares if is_first_counted else without_first
    if shares is None:
        raise ConfigError(
            f"no token of the step's {len(batches)} micro-batches counts for the loss",
            why=f"all labels are {IGNORED_LABEL}: the mean over no tokens is not a number",
            remedy="check that the data is not cut off before its answers, and the loss mask",
        )
    return shares


def _labels(batch: Any) -> torch.Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, torch.Tensor) else None


def _num_counted(labels: torch.Tensor) -> int:
    """Numbers that are predicted all count: none of them means to leave one out."""
    if labels.is_floating_point():
        return labels.numel()
    return int((labels != IGNORED_LABEL).sum())


def _shares(counts: Sequence[int]) -> list[float] | None:
    """None where nothing counts."""
    total = sum(counts)
    return [count / total for count in counts] if total else None


def counted_losses(
    found: Sequence[torch.Tensor], weights: Sequence[float], scale: float | None
) -> tuple[float, ...]:
    """Weighted losses as numbers, without the loss scale. One that counts for nothing is nothing,
    also where it is NaN: the mean over no token."""
    return tuple(
        float(loss) / (scale or 1.0) if weight else 0.0
        for loss, weight in zip(found, weights, strict=True)
    )


def num_tokens(batch: Any) -> int:
    """Tokens of a micro-batch: of its first two-dimensional tensor of whole numbers, or sequences
    where it has none."""
    from lohan.model.tracing.trace_ops import tensors_in

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
