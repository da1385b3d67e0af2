"""Whether an engine can be used: it may be at work, have failed, or be closed.

Owns these three facts and the errors that tell them; what stopping means is the engine's. Called by
the engine, on whatever thread its user calls it.
"""

import contextlib
from collections.abc import Callable, Iterator

from lohan.engine.seal_metadata import Sealed
from lohan.errors import CheckpointError, ScheduleError


class EngineLife:
    """One per engine. A failure is for good: the states in work are of two steps."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._is_closed = False
        self._is_working = False

    @contextlib.contextmanager
    def working(self, stop: Callable[[BaseException], None]) -> Iterator[None]:
        """Work that nothing may come between; whatever fails inside is the end, and is told to
        `stop`."""
        self._is_working = True
        try:
            yield
        except BaseException as error:
            if self.failure is None:
                self.failure = error
            stop(error)
            raise
        finally:
            self._is_working = False

    def close(self) -> bool:
        """The engine ends; False if it has before.

        Raises:
            ScheduleError: it is at work.
        """
        if self._is_closed:
            return False
        self._refuse_if_working()
        self._is_closed = True
        return True

    def refuse_if_over(self, run_id: str, seal: Sealed | None) -> None:
        """Before anything is done with the engine.

        Raises:
            ScheduleError: it is closed, or at work.
            CheckpointError: it has failed; says from where to go on.
        """
        if self._is_closed:
            raise ScheduleError(
                "the engine is closed",
                why="its states have been let go",
                remedy="attach again with the run's id",
            )
        if self.failure is not None:
            raise CheckpointError(
                f"the engine has failed before ({type(self.failure).__name__}: {self.failure})",
                why="a step was left in the middle, so the states in work are of two steps",
                remedy=f"attach again with run={run_id!r}: it goes on from step "
                f"{seal.step if seal else 'none: nothing was sealed'}",
            ) from self.failure
        self._refuse_if_working()

    def _refuse_if_working(self) -> None:
        if self._is_working:
            raise ScheduleError(
                "the engine was called from within its own work",
                why="a step goes on until it returns or raises: lanes, buffers and states are its",
                remedy="call it after the step, from one thread; to end a step, raise an exception "
                "in the loss function or press Ctrl-C",
            )
