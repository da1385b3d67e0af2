"""The parts of a model in the order they run: blocks, and the rest before, between and after.

Owns which parameter belongs to which segment and which segments borrow it. Does not find blocks
(`model.tracing.blocks` does) and holds no tensors. Read by `segmented_model` and by whoever plans
movement. `BlockId` counts segments.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from lohan.drive.weights.parameter_views import ParameterLayout, ParameterSet
from lohan.errors import ConfigError
from lohan.model.tracing.trace_model import Stretch
from lohan.vocabulary import BlockId


class SegmentKind(StrEnum):
    """What a segment is made of."""

    REST = "rest"
    """Code of the model outside its blocks: embedding, final norm, head, loss."""
    BLOCK = "block"
    """One of the repeated blocks."""


class Phase(StrEnum):
    """Why a segment's weights are needed."""

    FORWARD = "forward"
    BACKWARD = "backward"
    TURN = "turn"
    """Forward and backward in one visit: the last segment, whose logits do not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One step of the model's forward."""

    id: BlockId
    name: str
    """For a block its path in the model."""
    kind: SegmentKind
    parameters: tuple[str, ...]
    """Parameters it owns: those no earlier segment uses."""
    borrowed: tuple[tuple[str, BlockId], ...]
    """Parameters it uses that an earlier segment owns (tied weights), with the owner."""

    @property
    def used(self) -> tuple[str, ...]:
        """All parameters it uses."""
        return (*self.parameters, *(name for name, _ in self.borrowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMap:
    """All segments in order: first, the blocks of each run, what lies between, last."""

    segments: tuple[Segment, ...]
    unused: frozenset[str] = frozenset()
    """Blocks that the traced forward has left out."""

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __getitem__(self, segment: BlockId) -> Segment:
        return self.segments[segment]

    @property
    def blocks(self) -> tuple[Segment, ...]:
        """The repeated blocks only."""
        return tuple(item for item in self.segments if item.kind is SegmentKind.BLOCK)

    @property
    def last(self) -> Segment:
        """The segment that ends in the loss."""
        return self.segments[-1]

    def parameter_sets(
        self,
        model: torch.nn.Module,
        layouts: Mapping[BlockId, ParameterLayout] | None = None,
    ) -> dict[BlockId, ParameterSet]:
        """The parameters each segment owns, ready to be bound to flat buffers."""
        named = dict(model.named_parameters())
        return {
            segment.id: ParameterSet(
                segment.name,
                {name: named[name] for name in segment.parameters},
                layouts.get(segment.id) if layouts is not None else None,
            )
            for segment in self.segments
        }

    def with_backward(self, named: Mapping[str, torch.Tensor]) -> frozenset[BlockId]:
        """Segments that take part in backward: a trainable parameter (of `named`) is in them or
        before them."""
        reached, found = False, set()
        for segment in self.segments:
            reached = reached or any(named[name].requires_grad for name in segment.used)
            if reached:
                found.add(segment.id)
        return frozenset(found | {self.last.id})


def segments_from_trace(model: torch.nn.Module, stretches: Sequence[Stretch]) -> SegmentMap:
    """Lay the model out as its trace (`TraceableModel.run`) saw it, numbered as in its shape."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = {name: position for position, name in enumerate(names.values())}
    plan = []
    for stretch in stretches:
        used = sorted((names[identity] for identity in stretch.parameters), key=order.__getitem__)
        if stretch.block is None:
            plan.append((stretch.label, SegmentKind.REST, used))
        else:
            plan.append((stretch.block.name, SegmentKind.BLOCK, used))
    unused = {one.block.name for one in stretches if one.block is not None and not one.is_used}
    return replace(assign_segments(model, plan), unused=frozenset(unused))


def assign_segments(
    model: torch.nn.Module, plan: Sequence[tuple[str, SegmentKind, Sequence[str]]]
) -> SegmentMap:
    """Number the segments and give each parameter to the first that uses it.

    Raises:
        ConfigError: a parameter is in none of them.
    """
    owner: dict[str, BlockId] = {}
    segments = []
    for position, (title, kind, names) in enumerate(plan):
        segment_id = BlockId(position)
        distinct = list(dict.fromkeys(names))
        for name in distinct:
            owner.setdefault(name, segment_id)
        segments.append(
            Segment(
                id=segment_id,
                name=title,
                kind=kind,
                parameters=tuple(name for name in distinct if owner[name] == segment_id),
                borrowed=tuple((n, owner[n]) for n in distinct if owner[n] != segment_id),
            )
        )
    forgotten = sorted({name for name, _ in model.named_parameters()} - owner.keys())
    if forgotten:
        raise ConfigError(
            f"parameters {forgotten} belong to no segment",
            why="their weights would never be in place",
            remedy="use them in the forward pass, or take them out of the model",
        )
    return SegmentMap(segments=tuple(segments))
