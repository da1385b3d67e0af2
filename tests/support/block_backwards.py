"""Counts how blocks went backward: as graphs, or by running their own code again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lohan.drive.block_run import BlockRunner


@dataclass
class BlockBackwards:
    """How often either happened."""

    num_captured: int = 0
    num_again: int = 0


def count_backwards(monkeypatch: pytest.MonkeyPatch) -> BlockBackwards:
    """From now on."""
    counts = BlockBackwards()

    def counting(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if result is not False:
                setattr(counts, name, getattr(counts, name) + 1)
            return result

        return count

    for method, name in (("_graph_backward", "num_captured"), ("_run_again", "num_again")):
        monkeypatch.setattr(BlockRunner, method, counting(getattr(BlockRunner, method), name))
    return counts
