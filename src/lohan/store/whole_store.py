"""Work on all blocks at once (a seal, a verification): one at a time, and what it bars.

Owns nothing but whose turn it is. Used by `states`.
"""

import contextlib
import threading
from collections.abc import Iterator

from lohan.errors import bug
from lohan.vocabulary import BlockId


class WholeStoreTurn:
    """Whose turn it is. Nobody waits for it: two at a time are a mistake of the schedule."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: str | None = None
        self._is_barring_updates = False

    @contextlib.contextmanager
    def taken(self, what: str, *, should_bar_updates: bool) -> Iterator[None]:
        """Take the turn for as long as the block lasts.

        Raises:
            ScheduleError: somebody has it.
        """
        with self._lock:
            if self._holder is not None:
                raise bug(f"{what} began during {self._holder}")
            self._holder, self._is_barring_updates = what, should_bar_updates
        try:
            yield
        finally:
            with self._lock:
                self._holder, self._is_barring_updates = None, False

    def refuse_update(self, block: BlockId) -> None:
        """Refuse an update that would change bytes the holder of the turn works on.

        Raises:
            ScheduleError: the holder bars updates.
        """
        with self._lock:
            if self._is_barring_updates:
                raise bug(f"an update of block {block} began during {self._holder}")
