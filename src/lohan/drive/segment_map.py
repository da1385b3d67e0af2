"""The parts of a model in the order they run: blocks, and the rest before, between and after.

Owns which parameter belongs to which segment and which segments borrow it. Does not find blocks
(`lohan.model.blocks` does) and holds no tensors. Read by `segmented_model` and by whoever plans
movement. `BlockId` counts segments.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from lohan.drive.weights.parameter_views import ParameterLayout, ParameterSet
from lohan.errors import ConfigError
from lohan.model.blocks import FoundBlock, find_blocks
from lohan.model.trace_model import Stretch
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

    @property
    def needs(self) -> tuple[BlockId, ...]:
        """Segments whose parameters must be in place while this one runs."""
        owners = {owner for _, owner in self.borrowed}
        return (*sorted(owners), self.id) if self.parameters else tuple(sorted(owners))


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMap:
    """All segments in order: first, the blocks of each run, what lies between, last."""

    segments: tuple[Segment, ...]

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

    def with_backward(self, model: torch.nn.Module) -> frozenset[BlockId]:
        """Segments that take part in backward: a trainable parameter is in them or before them."""
        named = dict(model.named_parameters())
        reached, found = False, set()
        for segment in self.segments:
            reached = reached or any(named[name].requires_grad for name in segment.used)
            if reached:
                found.add(segment.id)
        return frozenset(found | {self.last.id})


def map_segments(
    model: torch.nn.Module,
    runs: Sequence[Sequence[str]] | None = None,
    rest_uses: Sequence[Sequence[str]] | None = None,
) -> SegmentMap:
    """Lay the model out in segments, by its structure alone.

    Args:
        model: any module; only its names and ties are looked at.
        runs: for each run of repeated blocks the paths of the blocks, in the order they are
            called; an encoder-decoder has two. Without it, those that `find_blocks` finds.
        rest_uses: for the rest before, between and after the runs, the names of the parameters
            it uses. Without it, a parameter outside the blocks is taken to be used where it is
            registered relative to the runs; `observe_rest_uses` finds out by running the model.

    Raises:
        ConfigError: no blocks, an unknown name, or lists that do not fit together.
    """
    runs = _runs_of(find_blocks(model)) if runs is None else runs
    _check_runs(model, runs)
    uses = rest_uses if rest_uses is not None else _uses_by_registration(model, runs)
    if len(uses) != len(runs) + 1:
        raise ConfigError(
            f"{len(runs)} runs of blocks have {len(runs) + 1} rests around them and "
            f"{len(uses)} were given",
            why="each needs its own list of parameters",
            remedy="give one list before, one between each two runs and one after",
        )
    first_name = {id(p): name for name, p in model.named_parameters()}
    any_name = {
        name: first_name[id(p)] for name, p in model.named_parameters(remove_duplicate=False)
    }
    unknown = sorted({name for used in uses for name in used} - any_name.keys())
    if unknown:
        raise ConfigError(
            f"{type(model).__name__} has no parameters {unknown}",
            why="they are named in `rest_uses`",
            remedy="name parameters as `model.named_parameters()` does",
        )
    plan: list[tuple[str, SegmentKind, list[str]]] = []
    for index, used in enumerate(uses):
        title = "embedding" if index == 0 else "head" if index == len(runs) else "bridge"
        plan.append((title, SegmentKind.REST, [any_name[name] for name in used]))
        for block in runs[index] if index < len(runs) else ():
            own = [first_name[id(p)] for p in model.get_submodule(block).parameters()]
            plan.append((block, SegmentKind.BLOCK, own))
    return _assign(model, plan)


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
    return _assign(model, plan)


def _runs_of(blocks: Sequence[FoundBlock]) -> list[list[str]]:
    runs: dict[str, list[str]] = {}
    for block in blocks:
        runs.setdefault(block.list_name, []).append(block.name)
    return list(runs.values())


def _check_runs(model: torch.nn.Module, runs: Sequence[Sequence[str]]) -> None:
    if not runs or not all(runs):
        raise ConfigError(
            f"{type(model).__name__} has no repeated block to work through",
            why="weights move block by block, and the list of blocks is empty",
            remedy="name the blocks, or leave `runs` out to have them found",
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = sorted({name for run in runs for name in run} - modules.keys())
    if unknown:
        raise ConfigError(
            f"{type(model).__name__} has no modules {unknown}",
            why="they are named as its blocks",
            remedy="name blocks as `model.named_modules()` does",
        )


def _assign(
    model: torch.nn.Module, plan: Sequence[tuple[str, SegmentKind, Sequence[str]]]
) -> SegmentMap:
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
            remedy="name them in `rest_uses` where the model uses them",
        )
    return SegmentMap(segments=tuple(segments))


def _uses_by_registration(model: torch.nn.Module, runs: Sequence[Sequence[str]]) -> list[list[str]]:
    # Modules are listed in the order they were registered; a run counts as passed by every
    # module registered after its first block.
    inside = tuple(f"{name}." for run in runs for name in run)
    listed = [name for name, _ in model.named_modules(remove_duplicate=False)]
    rank = {name: index for index, name in enumerate(listed)}
    starts = [rank[run[0]] for run in runs]
    uses: list[list[str]] = [[] for _ in range(len(runs) + 1)]
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not name.startswith(inside):
            owner_rank = rank[name.rpartition(".")[0]]
            uses[sum(owner_rank > start for start in starts)].append(name)
    return uses
