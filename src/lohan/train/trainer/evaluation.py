"""Evaluation batches in groups, so that weights are read once per group and not once per batch.

Owns the grouping between transformers' evaluation loop, which asks for one batch at a time, and
the engine, which takes several. Used by the trainer.
"""

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

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._dataloader)
        is_end = False
        while not is_end and (group := self._fetch(batches)):
            is_end = self._is_at_end()
            if is_end and len(group) > 1 and getattr(self._dataloader, "remainder", 0) > 0:
                # accelerate cuts what is gathered to the rows of the last batch once that is
                # fetched: the others come before it is known.
                self._dataloader.end_of_dataloader = False
                yield from self._predicted(group[:-1])
                self._dataloader.end_of_dataloader = True
                group = group[-1:]
            yield from self._predicted(group)
        self._current = None
        # To its own end, where it tells accelerate that it is over.
        yield from batches

    def _fetch(self, batches: Iterator[Any]) -> list[Any]:
        group: list[Any] = []
        for batch in batches:
            group.append(batch)
            if len(group) == self._num_batches or self._is_at_end():
                break
        return group

    def _is_at_end(self) -> bool:
        return bool(getattr(self._dataloader, "end_of_dataloader", False))

    def _predicted(self, group: list[Any]) -> Iterator[Any]:
        for batch, prediction in zip(group, self._predict(group), strict=True):
            self._current = (batch, prediction)
            yield batch

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)

    def prediction_of(self, batch: Any) -> Prediction | None:
        """The prediction of the batch handed out last; None for any other batch."""
        if self._current is not None and self._current[0] is batch:
            return self._current[1]
        return None
