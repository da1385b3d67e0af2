"""Listing the operators of a model's blocks while the plain model runs."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.model.tracing.trace_ops import is_counted


@dataclass(frozen=True, kw_only=True)
class ListedCall:
    ordinal: int
    name: str


class ListMode(TorchDispatchMode):
    def __init__(self, calls: list[ListedCall]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if is_counted(func):
            self._calls.append(
                ListedCall(
                    ordinal=len(self._calls),
                    name=func._overloadpacket.__name__,
                )
            )
        return result


@contextlib.contextmanager
def operators_listed(
    model: torch.nn.Module, runs: Sequence[Sequence[str]]
) -> Iterator[dict[str, list[ListedCall]]]:
    """Within it, each run of a block fills in the list of its operators."""
    listed: dict[str, list[ListedCall]] = {}

    def listing(path: str, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            listed[path] = []
            with ListMode(listed[path]):
                return forward(*args, **kwargs)

        return run

    blocks = [(path, model.get_submodule(path)) for run in runs for path in run]
    for path, block in blocks:
        block.forward = listing(path, block.forward)
    try:
        yield listed
    finally:
        for _, block in blocks:
            del block.forward
