"""Finding out by running a model which parameters its code outside the blocks uses, and where.

Owns one function. For models that are small enough to run, or on meta where they run there;
otherwise `lohan.model` traces on fake tensors (`segment_map.segments_from_trace`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.model.trace_ops import storage_key, tensors_in


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
