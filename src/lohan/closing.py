"""Letting go of everything at an end, with the first failure told.

Owns that rule, for all that opens several things. Called by whoever closes more than one.
"""

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Closing(contextlib.ExitStack):
    """An `ExitStack` of which the first failure is raised: what fails after it is a note of it.

    Everything is closed, whatever fails, the last one added first.
    """

    def callback(
        self, close: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Callable[P, T]:
        """Have `close` called at the end."""

        def leave(
            _kind: type[BaseException] | None,
            first: BaseException | None,
            _trace: TracebackType | None,
        ) -> None:
            try:
                close(*args, **kwargs)
            except Exception as error:
                if first is None:
                    raise
                first.add_note(f"closing failed after it: {type(error).__name__}: {error}")

        self.push(leave)
        return close
