"""A program that sends itself a signal when it says some words, or a while later.

`when` makes what goes into the environment of the program; `signal_when_told` is called by it. The
instant is kept by the system's own timer, so it is what was asked for however busy the machine is.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence

_NAME = "SIGNAL_WHEN"


def when(words: Sequence[str], number: signal.Signals, seconds: float = 0.0) -> dict[str, str]:
    """Send a signal when one of the words is printed; without words, at the start.

    After some seconds it is SIGALRM instead, which ends a process as SIGKILL does: at once, nothing
    of its own runs any more.
    """
    assert not seconds or number is signal.SIGKILL
    return {_NAME: json.dumps([list(words), int(number), seconds])}


def signal_when_told() -> None:
    if _NAME not in os.environ:
        return
    words, number, seconds = json.loads(os.environ[_NAME])

    def send() -> None:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        else:
            os.kill(os.getpid(), number)

    if not words:
        send()
        return
    real_write, is_sent = sys.stdout.write, False

    def write(text: str) -> int:
        nonlocal is_sent
        num_written = real_write(text)
        if not is_sent and any(word in text for word in words):
            is_sent = True
            sys.stdout.flush()
            send()
        return num_written

    sys.stdout.write = write  # type: ignore[method-assign]
