"""What the driver and its caller agree on: the calls around a segment, and groups of a step.

Owns names only. Implemented by the engine (hooks), read by `passes`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from lohan.drive.gradient_sums import SegmentGradients
from lohan.drive.segment_map import Phase
from lohan.vocabulary import BlockId


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
