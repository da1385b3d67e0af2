"""What copies under way keep alive on an accelerator, and until when.

Owns points of its streams and the ends of copies in flight. Used by `accelerator.py` alone.
"""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lohan.vocabulary import Lane


class StreamEvent:
    """A point in a stream."""

    __slots__ = ("event",)

    def __init__(self, event: Any, stream: Any) -> None:
        self.event = event
        self.event.record(stream)

    def is_done(self) -> bool:
        """Whether the stream has come past, well or badly."""
        try:
            return bool(self.event.query())
        except RuntimeError:
            return True  # ended badly; `wait` tells


@dataclass(slots=True)
class _Ends:
    done: StreamEvent
    on_device: Any
    in_ram: Any


class CopyEnds:
    """Ends of copies under way, per lane in order. Runs on: any thread.

    The allocator must not hand their memory out again before the copy is done, and it does not see
    what other streams do.
    """

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self._in_flight: dict[Lane, deque[_Ends]] = {lane: deque() for lane in lanes}
        self._lock = threading.Lock()

    def add(self, lane: Lane, done: StreamEvent, *, on_device: Any, in_ram: Any) -> None:
        """A copy was queued."""
        with self._lock:
            self._in_flight[lane].append(_Ends(done, on_device, in_ram))

    def let_go(self) -> None:
        """Drop those of copies that are done."""
        with self._lock:
            for ends in self._in_flight.values():
                while ends and ends[0].done.is_done():
                    ends.popleft()

    def hand_to_compute(self, event: StreamEvent) -> None:
        """Compute waits for a copy: its end on the device is in the order of compute again."""
        with self._lock:
            for ends in self._in_flight.values():
                if any(one.done is event for one in ends):
                    # A lane keeps its order: those before it are done when it is.
                    for one in ends:
                        one.on_device = None
                        if one.done is event:
                            break

    def clear(self) -> None:
        """Drop all: no copy is under way."""
        with self._lock:
            for ends in self._in_flight.values():
                ends.clear()
