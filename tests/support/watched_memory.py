"""A child process whose main memory is watched from outside, phase by phase.

Reads /proc/PID/status; the system keeps the peak (VmHWM), and it is set back when a phase begins,
so that nothing is missed between two looks. The peak of the last phase, which is gone with the
process, is told by the process itself when it ends (`tell_peak_at_end`).
"""

import atexit
import contextlib
import os
import pathlib
import re
import subprocess
from collections.abc import Sequence

_WISH = "TELL_PEAK_AT_END"
_PEAK = "peak at the end, in bytes: "


def tell_peak_at_end() -> None:
    """For programs that are watched: print the peak since the last phase began, as the last line.

    A parent that looks now and then may not get to look in the last moment, least of all on a busy
    machine.
    """
    if _WISH in os.environ:
        atexit.register(lambda: print(f"\n{_PEAK}{_peak_bytes('self')}", flush=True))


def _peak_bytes(process: int | str) -> int:
    status = pathlib.Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) * 1024 if found else 0


def peaks_of(
    command: Sequence[str | pathlib.Path], phases: Sequence[tuple[str, str]]
) -> dict[str, int]:
    """Run a command; the peak of its resident bytes in each phase.

    Args:
        phases: (what a line begins with or contains, name of the phase that begins with it), in
            the order they come. Before the first it is "start".
    """
    child = subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", _WISH: "1"},
    )
    watch = _Watch(child.pid)
    lines, left, is_end_told = [], list(phases), False
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.append(line)
            if left and left[0][0] in line:
                watch.begin(left.pop(0)[1])
            if line.startswith(_PEAK):
                watch.note(int(line.removeprefix(_PEAK)))
                is_end_told = True
    code = child.wait()
    assert code == 0, "".join(lines)
    assert not left, f"no phase {left[0][1]} in:\n" + "".join(lines)
    assert is_end_told, "".join(lines)
    return watch.peaks


class _Watch:
    """The peak of each phase."""

    def __init__(self, pid: int) -> None:
        self.peaks: dict[str, int] = {"start": 0}
        self._pid, self._phase = pid, "start"

    def note(self, peak_bytes: int) -> None:
        self.peaks[self._phase] = max(self.peaks[self._phase], peak_bytes)

    def begin(self, phase: str) -> None:
        # The process may be over by now: then it tells the rest itself.
        with contextlib.suppress(OSError):
            self.note(_peak_bytes(self._pid))
            pathlib.Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        self._phase = phase
        self.peaks[phase] = 0
