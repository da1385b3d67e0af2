"""Driving an unmodified PyTorch model block by block; see `SegmentedModel`.

Owns the main thread of a step: which code runs when, with which weights, and its gradients.
Imported by `lanes`, `engine` and what is above. Never moves a tensor itself: hooks do.
"""

from lohan.drive.gradient_sums import SegmentGradients
from lohan.drive.hooks import SegmentHooks
from lohan.drive.micro_batch import LossFunction
from lohan.drive.segment_map import (
    Phase,
    Segment,
    SegmentKind,
    SegmentMap,
    segments_from_trace,
)
from lohan.drive.segmented_model import SegmentedModel
from lohan.drive.surroundings.randomness import DrawsUnknown

__all__ = [
    "DrawsUnknown",
    "LossFunction",
    "Phase",
    "Segment",
    "SegmentGradients",
    "SegmentHooks",
    "SegmentKind",
    "SegmentMap",
    "SegmentedModel",
    "segments_from_trace",
]
