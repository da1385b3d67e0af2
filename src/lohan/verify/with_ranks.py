"""The other ranks of a comparison: processes that take part in every run this one judges.

Owns their start and their end; this process is the first rank. They make the same small copy by its
name and run the same cases. Used by `compare`.
"""

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from lohan.errors import ConfigError

_END_SECONDS = 30.0


@contextlib.contextmanager
def other_ranks(num_ranks: int, follow: Callable[..., None], *given: Any) -> Iterator[None]:
    """Processes that call `follow(rank, num_ranks, *given)` while this one is the first rank.

    Raises:
        ConfigError: this process is a rank of something else already.
    """
    if dist.is_initialized():
        raise ConfigError(
            "this process is in a process group already",
            why="ranks that are compared are started here",
            remedy="start it by itself, without torchrun",
        )
    # A process that has computed cannot be forked: its threads would be missing.
    started = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lohan-verify-ranks-") as place:
        store = f"file://{place}/store"
        others = [
            started.Process(target=_run, args=(store, rank, num_ranks, follow, given), daemon=True)
            for rank in range(1, num_ranks)
        ]
        try:
            for other in others:
                other.start()
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=num_ranks)
            yield
            for other in others:
                other.join(_END_SECONDS)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for other in others:
                if other.is_alive():
                    other.terminate()


def _run(
    store: str, rank: int, num_ranks: int, follow: Callable[..., None], given: tuple[Any, ...]
) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    follow(rank, num_ranks, *given)
    dist.destroy_process_group()
