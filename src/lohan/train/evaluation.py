"""Evaluation batches in groups, so that weights are read once per group and not once per batch.

Owns the grouping between transformers' evaluation loop, which asks for one batch at a time, and
the engine, which takes several. Used by the trainer.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Prediction:
    """What transformers expects for a batch: loss, logits and labels."""

    loss: Any
    logits: Any
    labels: Any


class GroupedBatches:
    """A dataloader that has predicted a batch before it hands it out.

    `predict` gets up to `num_batches` batches and returns one Prediction each. Everything else is
    the dataloader's.
    """

    def __init__(
        self,
        dataloader: Any,
        predict: Callable[[list[Any]], list[Prediction]],
        *,
        num_batches: int,
    ) -> None:
        self._dataloader, self._predict, self._num_batches = dataloader, predict, num_batches
        self._current: tuple[Any, Prediction] | None = None
        self._num_rows: int | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._dataloader)
        while group := list(itertools.islice(batches, self._num_batches)):
            is_end = getattr(self._dataloader, "end_of_dataloader", False)
            num_left = getattr(self._dataloader, "remainder", -1)
            predictions = self._predict(group)
            for number, (batch, prediction) in enumerate(zip(group, predictions, strict=True)):
                is_last = is_end and number == len(group) - 1
                self._num_rows = num_left if is_last and num_left > 0 else None
                self._current = (batch, prediction)
                yield batch
        self._current = None

    def rows_of_batch(self, tensor: Any) -> Any:
        """Cut what the loop repeated per row to the rows of the batch handed out.

        accelerate does this while the last batch is the one fetched last, which it is not here.
        """
        return tensor if self._num_rows is None else tensor[: self._num_rows]

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)

    def prediction_of(self, batch: Any) -> Prediction | None:
        """The prediction of the batch handed out last; None for any other batch."""
        if self._current is not None and self._current[0] is batch:
            return self._current[1]
        return None
