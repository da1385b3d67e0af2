"""Sums of gradients over the micro-batches of a step, one flat buffer per segment.

The sum is the one that calling `backward` once per micro-batch leaves in `.grad`: the first
gradient as it is, every further one added in the type of the parameter. Reduction groups have sums
of their own, one behind the other in the buffer. Owns the order and the buffers until a segment is
finished; then the caller owns them. Called by `segmented_model`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lohan.drive.weights.parameter_views import ParameterLayout, ParameterSet, bytes_of
from lohan.errors import ScheduleError
from lohan.vocabulary import BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentGradients:
    """The finished gradients of one segment."""

    segment: BlockId
    layout: ParameterLayout
    """Places of the trainable parameters in `flat`."""
    flat: torch.Tensor
    """All gradients, as bytes: those of a group in each row. Padding is zero."""
    missing_by_group: tuple[frozenset[str], ...]

    @property
    def missing(self) -> frozenset[str]:
        """Trainable parameters that got no gradient at all (`.grad` is None in plain training).
        Their places are zero, but an optimizer must leave them alone: decay and momentum do not
        apply."""
        return frozenset.intersection(*self.missing_by_group)


def gradient_layout(parameters: ParameterSet) -> ParameterLayout:
    """Where a segment's gradients lie: as the parameters do, or packed if some are frozen."""
    trainable = {n: p for n, p in parameters.parameters.items() if n in parameters.trainable}
    if len(trainable) == len(parameters.parameters):
        return parameters.layout
    return ParameterLayout.pack(trainable)


class GradientSums:
    """The flat gradient buffers of the segments that have begun and not finished."""

    def __init__(
        self,
        sets: Mapping[BlockId, ParameterSet],
        buffer_for: Callable[[BlockId, int], torch.Tensor],
        num_groups: int = 1,
    ) -> None:
        self._buffer_for, self._num_groups = buffer_for, num_groups
        self._layouts = {segment: gradient_layout(own) for segment, own in sets.items()}
        self._place = {
            sets[segment].parameters[slot.name]: (segment, slot)
            for segment, layout in self._layouts.items()
            for slot in layout.slots
        }
        self._flat: dict[BlockId, torch.Tensor] = {}
        self._seen: dict[BlockId, list[dict[str, torch.Tensor]]] = {}
        """By group the places of those that have come."""

    def owner(self, parameter: torch.nn.Parameter) -> BlockId | None:
        """The segment whose buffer a parameter's gradient belongs to."""
        place = self._place.get(parameter)
        return place[0] if place is not None else None

    def add(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, group: int = 0) -> None:
        """Add the whole gradient of one micro-batch; to be called in the order of these."""
        segment, slot = self._place[parameter]
        if gradient.layout is not torch.strided:
            raise ScheduleError(
                f"the gradient of {slot.name} is sparse",
                why="gradients leave in one flat buffer",
                remedy="make the embedding with sparse=False",
            )
        if segment not in self._flat:
            self._begin(segment)
        seen = self._seen[segment][group]
        place = seen.get(slot.name)
        if place is not None:
            place.add_(gradient)
        else:
            # Not zero plus gradient: that would turn -0.0 into 0.0.
            seen[slot.name] = slot.view(self._flat[segment][group]).copy_(gradient)

    def _begin(self, segment: BlockId) -> None:
        num_bytes = self._num_groups * self._layouts[segment].num_bytes
        flat = bytes_of(self._buffer_for(segment, num_bytes), num_bytes, f"segment {segment}")
        # More than was asked for is for whoever made the buffer, at the end of every group.
        self._flat[segment] = flat.view(self._num_groups, -1)
        self._seen[segment] = [{} for _ in range(self._num_groups)]

    def finish(self, segment: BlockId) -> SegmentGradients | None:
        """The gradients of a segment, complete; None if none of its parameters is trainable."""
        layout = self._layouts[segment]
        if not layout.slots:
            return None
        if segment not in self._flat:
            self._begin(segment)
        flat, seen = self._flat.pop(segment), self._seen.pop(segment)
        for own, found in zip(flat, seen, strict=True):
            end_bytes = 0
            for slot in layout.slots:
                if end_bytes < slot.offset_bytes:
                    own[end_bytes : slot.offset_bytes].zero_()
                end_bytes = slot.offset_bytes + slot.num_bytes
                if slot.name not in found:
                    own[slot.offset_bytes : end_bytes].zero_()
            own[end_bytes:].zero_()
        missing = tuple(frozenset(layout.names()).difference(found) for found in seen)
        return SegmentGradients(segment=segment, layout=layout, flat=flat, missing_by_group=missing)
