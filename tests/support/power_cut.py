"""Power that fails: at the N-th event everything stops, and what was not flushed may be gone.

`VolatileEngine` sits in front of a real engine and remembers, for every write since the last flush
of its file, what was there before. `cut` undoes a random choice of them, page by page, as a drive
with a volatile cache may. `stop_at` counts events of the engine and of the manifest's calls into
the operating system, and stops all of them from the N-th on.
"""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lohan.ssd import IoEngine, IoFile, Priority, Ticket

PAGE = 4096


class PowerCut(BaseException):
    """The machine is off: nothing of what follows happens."""


class Countdown:
    """Stops everything from the N-th event on; counts them if there is no N."""

    def __init__(
        self, stop_at: int | None = None, on_stop: Callable[[], None] | None = None
    ) -> None:
        self.num_events = 0
        self._stop_at = stop_at
        self._on_stop = on_stop

    def event(self) -> None:
        self.num_events += 1
        if self._stop_at is not None and self.num_events >= self._stop_at:
            if self._on_stop is not None:
                self._on_stop()
            raise PowerCut


class VolatileEngine:
    """`IoEngine` whose unflushed writes can be lost."""

    def __init__(self, inner: IoEngine, countdown: Countdown) -> None:
        self._inner = inner
        self._countdown = countdown
        self._undo: list[tuple[str, int, bytes]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start_write(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> Ticket:
        self._countdown.event()
        with open(file.path, "rb") as before:
            before.seek(offset_bytes)
            content = before.read(nbytes)
        for start in range(0, nbytes, PAGE):
            self._undo.append((file.path, offset_bytes + start, content[start : start + PAGE]))
        return self._inner.start_write(file, offset_bytes, address, nbytes, priority)

    def start_read(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> Ticket:
        self._countdown.event()
        return self._inner.start_read(file, offset_bytes, address, nbytes, priority)

    def start_flush(self, file: IoFile) -> Ticket:
        self._countdown.event()
        ticket = self._inner.start_flush(file)
        self._inner.wait(ticket)
        self._countdown.event()
        self._undo = [entry for entry in self._undo if entry[0] != file.path]
        return ticket

    def cut(self, seed: int) -> None:
        """Lose a random choice of the pages written since their file was flushed."""
        chance = random.Random(seed)
        share = chance.choice([0.0, 0.3, 1.0])
        for path, offset_bytes, content in reversed(self._undo):
            if chance.random() < share:
                with open(path, "r+b") as file:
                    file.seek(offset_bytes)
                    file.write(content)


@contextlib.contextmanager
def counted_system_calls(countdown: Countdown) -> Iterator[None]:
    """Count the calls a manifest is written with, before and after each."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "write", "unlink"):
            call = getattr(os, name)

            def counted(*args: Any, call: Callable[..., Any] = call, **kwargs: Any) -> Any:
                countdown.event()
                result = call(*args, **kwargs)
                countdown.event()
                return result

            patch.setattr(os, name, counted)
        yield
