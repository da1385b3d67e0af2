"""Standard output and errors that a long run does not depend on.

Owns what happens when nobody reads them any more (a closed pipe, a terminal that is gone) or they
take no more (a full disk): that is said once, and the run goes on with its log. And an order to
end, which lets what was begun be cleaned up. Called by `train`, `profile` and `verify`.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class _Lasting:
    """A stream of text that takes everything; what cannot be written is dropped."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        """As the stream does it, as long as it can."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """As the stream does it, as long as it can."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # The descriptor itself, so that what is still buffered and other writers do not fail.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        sys.stderr.write(
            f"note: {self._name} cannot be written any more ({error.strerror}); the run "
            "goes on, and its log has what it says\n"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Within it, writing to standard output or errors never fails."""
    with (
        contextlib.redirect_stdout(_Lasting(sys.stdout, "standard output")),
        contextlib.redirect_stderr(_Lasting(sys.stderr, "standard error")),
    ):
        try:
            yield
        finally:
            sys.stdout.flush()


@contextlib.contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Within it, an order to end is obeyed like Ctrl-C: blocks are left in order."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
