"""A child process whose main memory is watched from outside, phase by phase.

Reads /proc/PID/status; the system keeps the peak (VmHWM), and it is set back when a phase begins,
so that nothing is missed between two looks.
"""

import contextlib
import os
import pathlib
import re
import subprocess
import threading
from collections.abc import Sequence


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
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
    )
    watch = _Watch(child.pid)
    lines, left = [], list(phases)
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.append(line)
            if left and left[0][0] in line:
                watch.begin(left.pop(0)[1])
    code = child.wait()
    watch.end()
    assert code == 0, "".join(lines)
    assert not left, f"no phase {left[0][1]} in:\n" + "".join(lines)
    return watch.peaks


class _Watch:
    """Looks often, because the last peak is gone with the process."""

    def __init__(self, pid: int) -> None:
        self.peaks: dict[str, int] = {"start": 0}
        self._process = pathlib.Path(f"/proc/{pid}")
        self._phase = "start"
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def begin(self, phase: str) -> None:
        with self._lock:
            self._look()
            self._phase = phase
            self.peaks[phase] = 0
            with contextlib.suppress(OSError):
                (self._process / "clear_refs").write_text("5")

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.005):
            with self._lock:
                self._look()

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+)", (self._process / "status").read_text())
            if found:
                peak = int(found[1]) * 1024
                self.peaks[self._phase] = max(self.peaks[self._phase], peak)
