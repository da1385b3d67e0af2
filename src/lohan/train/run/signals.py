"""Stopping a run: the first SIGINT or SIGTERM is remembered, the second one ends the process.

Owns the signal handlers while `train` runs, and nothing else: the trainer looks at the request at
the end of each step, seals and leaves. Handlers run on the main thread, between two bytecodes.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_BY_SIGNAL = 128


@dataclass(slots=True)
class StopRequest:
    """What was asked for so far."""

    signal_number: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether the run is to end after this step."""
        return self.signal_number is not None

    @property
    def name(self) -> str:
        """The signal's name, for messages."""
        return "" if self.signal_number is None else signal.Signals(self.signal_number).name


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within it, the first signal sets the request. Outside the main thread it does nothing."""
    request = StopRequest()
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
        sys.stderr.write(
            f"\n{request.name}: this step is finished and sealed, then the run ends; "
            "once more to stop at once\n"
        )
        sys.stderr.flush()

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number in _SIGNALS:
            signal.signal(number, remember)
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(request: StopRequest) -> None:
    """End as a program stopped by that signal does: KeyboardInterrupt, or exit code 143."""
    if request.signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    if request.signal_number is not None:
        raise SystemExit(EXIT_BY_SIGNAL + request.signal_number)
