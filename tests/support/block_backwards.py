"""Counts how blocks went backward: through a kept graph, or run again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lohan.drive.block_run import BlockRunner
from lohan.drive.kept_graph import KeptGraph


@dataclass
class BlockBackwards:
    """How often either happened."""

    num_kept: int = 0
    num_again: int = 0


def count_backwards(monkeypatch: pytest.MonkeyPatch) -> BlockBackwards:
    """From now on."""
    counts = BlockBackwards()

    def counting(original: Callable[..., None], name: str) -> Callable[..., None]:
        def count(*args: Any, **kwargs: Any) -> None:
            setattr(counts, name, getattr(counts, name) + 1)
            original(*args, **kwargs)

        return count

    monkeypatch.setattr(KeptGraph, "backward", counting(KeptGraph.backward, "num_kept"))
    monkeypatch.setattr(BlockRunner, "_run_again", counting(BlockRunner._run_again, "num_again"))
    return counts
