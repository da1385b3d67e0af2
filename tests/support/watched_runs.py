"""Runs a program and measures its memory from outside, phase by phase.

The kernel's own peak of resident memory (VmHWM), reset at each phase, sees every spike; sampling
would not.
"""

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from support.offloaded_run import Settings

TESTS = pathlib.Path(__file__).parents[1]


@dataclass
class Watched:
    """Peak resident bytes of each phase above the bare process, and what the program said."""

    bare_bytes: int
    peaks: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def peak_bytes(self) -> int:
        """The most over all phases."""
        return max(self.peaks.values())


def watch(settings: Settings) -> Watched:
    """Run `support.offloaded_run`."""
    command = [sys.executable, "-m", "support.offloaded_run", json.dumps(asdict(settings))]
    child = subprocess.Popen(
        command,
        cwd=TESTS,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    watched = Watched(bare_bytes=0)
    phase = ""
    try:
        for line in child.stdout:
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            if phase == "":
                watched.bare_bytes = _status(child.pid, "VmRSS")
            else:
                most = _status(child.pid, "VmHWM")
                watched.peaks[phase] = max(watched.peaks.get(phase, 0), most - watched.bare_bytes)
            phase = said.pop("phase")
            watched.facts.update(said)
            pathlib.Path(f"/proc/{child.pid}/clear_refs").write_text("5")
            child.stdin.write("\n")
            child.stdin.flush()
    finally:
        child.stdin.close()
        watched.error = child.stderr.read()
        child.stderr.close()
        child.stdout.close()
        child.wait()
    return watched


def _status(pid: int, name: str) -> int:
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{name} is not in the status of process {pid}")
