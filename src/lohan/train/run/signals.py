"""Stopping a run: the first SIGINT or SIGTERM is remembered, the second one ends the process.

Owns the signal handlers while a run is prepared and trained, and nothing else: the trainer looks at
the request at the end of each step, seals and leaves. Where there is no step to finish a signal is
raised at once, so that everything on the way out is undone. Handlers run on the main thread,
between two bytecodes.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_BY_SIGNAL = 128
T = TypeVar("T")
_AFTER_STEP = "this step is finished and sealed"


@dataclass(slots=True)
class StopRequest:
    """What was asked for so far."""

    signal_number: int | None = None
    is_at_once: bool = False
    """Whether a signal is raised where the program is, instead of after the step."""
    until: str = _AFTER_STEP
    """What is done before a run that was asked to ends."""

    @property
    def is_set(self) -> bool:
        """Whether the run is to end after this step."""
        return self.signal_number is not None

    @property
    def name(self) -> str:
        """The signal's name, for messages."""
        return "" if self.signal_number is None else signal.Signals(self.signal_number).name

    def begin_steps(self) -> None:
        """From now on there is a step to finish."""
        self.is_at_once, self.until = False, _AFTER_STEP

    def between(self, items: Iterable[T]) -> Iterator[T]:
        """Items one by one; a signal is raised between two of them, where all can be undone."""
        self.is_at_once, self.until = False, "what was written so far is taken back"
        for item in items:
            leave(self)
            yield item


@contextlib.contextmanager
def stop_on_signals(*, is_at_once: bool) -> Iterator[StopRequest]:
    """Within it, the first signal sets the request. Outside the main thread it does nothing.

    The signal of a terminal that is closed does nothing: a run does not need it.
    """
    request = StopRequest(is_at_once=is_at_once)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def remember(number: int, _frame: FrameType | None) -> None:
        if request.is_set:
            # Nothing sealed can be lost by ending here, and waiting is what was not wanted.
            sys.stderr.write("\nstopped at once; the last seal is the resume point\n")
            sys.stderr.flush()
            os._exit(EXIT_BY_SIGNAL + number)
        request.signal_number = number
        if request.is_at_once:
            sys.stderr.write(f"\n{request.name}: stopped at once\n")
            leave(request)
        sys.stderr.write(
            f"\n{request.name}: {request.until}, then the run ends; once more to stop at once\n"
        )
        sys.stderr.flush()

    before = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGHUP)}
    try:
        for number in _SIGNALS:
            signal.signal(number, remember)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        yield request
    finally:
        for number, handler in before.items():
            # Not where a callback has put back what it found before us.
            if signal.getsignal(number) in (remember, signal.SIG_IGN):
                signal.signal(number, handler)


def leave(request: StopRequest) -> None:
    """End as a program stopped by that signal does: KeyboardInterrupt, or exit code 143."""
    if request.signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    if request.signal_number is not None:
        raise SystemExit(EXIT_BY_SIGNAL + request.signal_number)
