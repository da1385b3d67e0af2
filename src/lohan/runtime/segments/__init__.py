"""Driving an unmodified PyTorch model block by block; see `step.SegmentedModel`."""

from lohan.runtime.randomness import DrawsUnknown
from lohan.runtime.segments.gradients import SegmentGradients
from lohan.runtime.segments.hooks import ForwardOrder, SegmentHooks
from lohan.runtime.segments.micro_batch import LossFunction
from lohan.runtime.segments.observe import observe_rest_uses
from lohan.runtime.segments.segment_map import (
    Phase,
    Segment,
    SegmentKind,
    SegmentMap,
    map_segments,
    segments_from_trace,
)
from lohan.runtime.segments.step import SegmentedModel

__all__ = [
    "DrawsUnknown",
    "ForwardOrder",
    "LossFunction",
    "Phase",
    "Segment",
    "SegmentGradients",
    "SegmentHooks",
    "SegmentKind",
    "SegmentMap",
    "SegmentedModel",
    "map_segments",
    "observe_rest_uses",
    "segments_from_trace",
]
