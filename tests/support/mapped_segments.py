"""A model laid out in segments by its structure, or by running it; the product does it by a trace.

For tests of `lohan.drive` on models made by hand (`segment_map.segments_from_trace` is what an
engine uses).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.drive.segment_map import SegmentKind, SegmentMap, assign_segments
from lohan.errors import ConfigError
from lohan.model.tracing.blocks import FoundBlock, find_blocks
from lohan.model.tracing.trace_ops import storage_key, tensors_in


class _UseMode(TorchDispatchMode):
    """Notes which of the given storages are read."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.used: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tensors_in((args, kwargs or {})):
            name = self._names.get(storage_key(tensor))
            if name is not None:
                self.used[name] = None
        return func(*args, **(kwargs or {}))


def observe_rest_uses(
    model: torch.nn.Module, runs: Sequence[Sequence[str]], run_model: Callable[[], object]
) -> list[list[str]]:
    """Run the model once and note which parameters each rest uses; for `map_segments`.

    The model's parameters need storages of their own (data, or meta tensors). Parameters that
    the run does not touch are put into the first segment.
    """
    names = {storage_key(p): name for name, p in model.named_parameters()}
    uses: list[dict[str, None]] = [{}]
    run_of = {name: index for index, run in enumerate(runs) for name in run}
    handles = []

    def pause(index: int) -> Callable[..., None]:
        def before(*_: object) -> None:
            uses[-1].update(mode.used)
            mode.used = {}
            while len(uses) <= index + 1:
                uses.append({})

        return before

    def forget(*_: object) -> None:
        mode.used = {}

    try:
        for block, index in run_of.items():
            module = model.get_submodule(block)
            handles.append(module.register_forward_pre_hook(pause(index), prepend=True))
            handles.append(module.register_forward_hook(forget, prepend=True))
        with torch.no_grad(), _UseMode(names) as mode:
            run_model()
        uses[-1].update(mode.used)
    finally:
        for handle in handles:
            handle.remove()
    inside = {id(p) for run in runs for name in run for p in model.get_submodule(name).parameters()}
    found = {name for used in uses for name in used}
    untouched = [
        name for name, p in model.named_parameters() if id(p) not in inside and name not in found
    ]
    return [[*uses[0], *untouched], *(list(used) for used in uses[1:])]


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
    return assign_segments(model, plan)


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
