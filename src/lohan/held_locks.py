"""Locks that belong to one process: a child that is forked does not hold them.

Owns which descriptors are locks. A lock of `flock` lasts as long as any process has the descriptor,
so a data-loader worker would keep a run locked after its parent was killed. Called by whoever locks
a folder of a run.
"""

import contextlib
import fcntl
import os

_held: set[int] = set()


def hold(descriptor: int) -> int:
    """Keep a locked descriptor from children that are forked from now on."""
    _held.add(descriptor)
    return descriptor


def let_go(descriptor: int) -> None:
    """Unlock and close it. In a child, which does not have it, nothing is done; nor is it twice."""
    if descriptor in _held:
        _held.discard(descriptor)
        # A child forked by other means than Python's may have a copy, so closing is not enough.
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _drop_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_drop_in_child)
