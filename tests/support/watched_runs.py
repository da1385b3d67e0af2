"""Runs a program and measures its memory from outside, phase by phase.

The kernel's own peak of resident memory (VmHWM), reset at each phase, sees every spike; sampling
would not. What the memory is made of (/proc/PID/smaps) is looked at when a phase ends, for whoever
has to understand a peak that is too high on a machine that is not at hand.
"""

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from lohan.units import MIB
from support.offloaded_run import Settings

TESTS = pathlib.Path(__file__).parents[1]


@dataclass
class Watched:
    """Peak resident bytes of each phase above the bare process, and what the program said."""

    bare_bytes: int
    bare_kinds: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    """At the end of each phase, resident bytes by what they are."""
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """What a program that failed left on standard error."""

    @property
    def peak_bytes(self) -> int:
        """The most over all phases."""
        return max(self.peaks.values())

    def story(self) -> str:
        """All that was seen, in MiB above the bare process, and what the engine counted itself."""
        lines = [f"bare process: {_in_mib(self.bare_kinds)}, in all {self.bare_bytes / MIB:.1f}"]
        for phase, peak in self.peaks.items():
            names = self.kinds[phase] | self.bare_kinds
            growth = {
                name: self.kinds[phase].get(name, 0) - self.bare_kinds.get(name, 0)
                for name in names
            }
            lines.append(f"{phase}: peak {peak / MIB:.1f}; at its end {_in_mib(growth)}")
        lines.append(f"the program: {self.facts}")
        with open("/proc/cpuinfo") as cpuinfo:
            flags = next((line for line in cpuinfo if line.startswith("flags")), "")
        wide = [flag for flag in flags.split() if flag.startswith(("avx", "amx"))]
        pages = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
        huge = pages.read_text().strip() if pages.exists() else "?"
        lines.append(f"the machine: {os.cpu_count()} cores, {wide}, huge pages {huge}")
        return "\n".join(lines)


def _in_mib(kinds: dict[str, int]) -> str:
    return ", ".join(f"{name} {nbytes / MIB:.1f}" for name, nbytes in kinds.items() if nbytes)


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
                watched.bare_kinds = _kinds(child.pid)
            else:
                most = _status(child.pid, "VmHWM")
                watched.peaks[phase] = max(watched.peaks.get(phase, 0), most - watched.bare_bytes)
                watched.kinds[phase] = _kinds(child.pid)
            phase = said.pop("phase")
            watched.facts.update(said)
            pathlib.Path(f"/proc/{child.pid}/clear_refs").write_text("5")
            child.stdin.write("\n")
            child.stdin.flush()
    finally:
        child.stdin.close()
        said_of_errors = child.stderr.read()
        child.stderr.close()
        child.stdout.close()
        if child.wait():
            watched.error = said_of_errors or f"it ended with {child.returncode}"
    return watched


def _status(pid: int, name: str) -> int:
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{name} is not in the status of process {pid}")


def _kinds(pid: int) -> dict[str, int]:
    """Resident bytes of the heap, of mappings by size, of stacks and of files."""
    found: dict[str, int] = {}
    kind = ""
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            kind = _kind_of(words[5] if len(words) > 5 else "", end - begin)
        elif words[0] in ("Rss:", "AnonHugePages:"):
            name = kind if words[0] == "Rss:" else "huge pages among them"
            found[name] = found.get(name, 0) + int(words[1]) * 1024
    return dict(sorted(found.items()))


def _kind_of(name: str, nbytes: int) -> str:
    if name.startswith("/"):
        return "memory shared" if name.startswith(("/dev/shm", "/memfd")) else "files"
    if name:
        return name
    return "mappings of 1 MiB and more" if nbytes >= MIB else "small mappings"
