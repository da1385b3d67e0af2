"""Which engine this machine gets, and why.

Owns the choice at run time and the sentence shown for it. Called by whoever starts a run, once.
"""

import errno
import os
import pathlib

from lohan import _native
from lohan.ssd.engines.native_engine import NativeEngine

_DISABLED_SWITCH = pathlib.Path("/proc/sys/kernel/io_uring_disabled")


def choose_engine() -> tuple[NativeEngine, str]:
    """Return the best engine of this machine and the reason: io_uring, else threads."""
    try:
        return NativeEngine(is_uring=True), "io_uring: the kernel offers it"
    except OSError as error:
        refusal = explain_uring_refusal(error.errno or errno.EIO)
        return NativeEngine(is_uring=False), f"threads: {refusal}"


def explain_uring_refusal(number: int) -> str:
    """Say why io_uring does not work, from the errno of its set-up call."""
    if not _native.is_uring_compiled_in():
        return "this build has no io_uring, the kernel headers it was compiled with lacked it"
    said = f"io_uring_setup said errno {number} ({os.strerror(number)})"
    if number == errno.ENOSYS:
        return f"the kernel has no io_uring; {said}"
    if number == errno.EPERM:
        switch = _read_switch()
        if switch not in (None, "0"):
            return f"io_uring is switched off, kernel.io_uring_disabled is {switch}; {said}"
        return f"a sandbox (seccomp, a container) forbids io_uring; {said}"
    if number == errno.ENOMEM:
        return f"the locked-memory limit (ulimit -l) is too low for io_uring; {said}"
    return said


def _read_switch() -> str | None:
    try:
        return _DISABLED_SWITCH.read_text().strip()
    except OSError:
        return None
