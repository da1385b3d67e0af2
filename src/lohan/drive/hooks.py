"""What the driver and its caller agree on: the order of a forward, and the calls around a segment.

Owns names only. Implemented by the engine (hooks), read by `passes`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from lohan.drive.gradient_sums import SegmentGradients
from lohan.drive.segment_map import Phase
from lohan.vocabulary import BlockId


class ForwardOrder(StrEnum):
    """In which order the forwards of a step's micro-batches go through the blocks."""

    LAYER_MAJOR = "layer_major"
    """All micro-batches through a block, then the next block: each block's weights come once."""
    MICRO_BATCH_MAJOR = "micro_batch_major"
    """One micro-batch after the other, as plain training does. Needed once for each batch shape
    of a model with dropout, to learn how many random numbers a forward draws."""


class SegmentHooks(Protocol):
    """What the driver calls on the main thread around the work of a segment."""

    def before(self, segment: BlockId, phase: Phase) -> None:
        """Every parameter in `Segment.used` must be in place when this returns."""

    def recomputed(self, segment: BlockId) -> None:
        """A block has run again for one micro-batch, and goes backward next."""

    def after(self, segment: BlockId, phase: Phase, gradients: SegmentGradients | None) -> None:
        """Weights may leave. After backward (or the turn) the segment's gradients are complete,
        and their buffer belongs to the callee; None if it has no trainable parameter."""

    def gradient_buffer(self, segment: BlockId, num_bytes: int) -> torch.Tensor:
        """A flat buffer for the segment's gradients, of all reduction groups; its contents do not
        matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The reduction groups of a rank in one step. Each has a sum of gradients and random numbers
    of its own; in memory they are counted from the rank's first."""

    of: tuple[int, ...]
    """The group of each micro-batch, ascending, counted over all ranks."""
    first: int = 0
    every: int = 1
    """A rank has every so manieth group from its first on: the number of ranks."""
    count: int = 1
    step: int = 0
    """The number of the step: no two draw alike."""
