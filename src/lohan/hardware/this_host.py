"""The machine this runs on: what it is, and the newest profile that was measured on it.

Owns where profiles are kept and the little of them that planning needs; `lohan.measure` makes
them. Needs no torch.
"""

import json
import os
import pathlib
from dataclasses import dataclass

from lohan.errors import ConfigError
from lohan.hardware.machine import Machine
from lohan.units import KIB

PROFILES = "profile-*.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptMachine:
    """A machine as it was measured, and when."""

    machine: Machine
    measured_at: str
    """In ISO form."""


def cache_directory() -> pathlib.Path:
    """Where profiles are kept.

    Raises:
        ConfigError: this user has no home directory.
    """
    # A relative path in the variable is to be ignored, says its specification.
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return pathlib.Path(named) / "lohan"
    try:
        return pathlib.Path.home() / ".cache" / "lohan"
    except RuntimeError as error:
        raise ConfigError(
            "there is no place for profiles",
            why=str(error),
            remedy="set XDG_CACHE_HOME to a directory",
        ) from error


def kept_machine(num_drives: int | None = None) -> KeptMachine:
    """The newest profile of this host, of so many drives if a number is given.

    Raises:
        ConfigError: this machine has not been measured.
    """
    here = (cpu_model(), ram_total_bytes())
    found = []
    for path in cache_directory().glob(PROFILES):
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            facts = kept["facts"]
            machine = Machine.from_json(json.dumps(kept["machine"]), where=str(path))
            there = (facts["cpu_model"], facts["ram_total_bytes"])
        except (OSError, ValueError, KeyError, TypeError, ConfigError):
            continue  # damaged, or of another version: measuring replaces it
        if there == here and num_drives in (None, len(facts["drives"])):
            found.append((str(kept.get("measured_at", "")), machine))
    if not found:
        raise ConfigError(
            "no machine is given, and this one has not been measured",
            why="what a step takes depends on drives, copies and compute",
            remedy="measure it with lohan profile --ssd DIR, or name one with --machine (lohan "
            "machines lists them)",
        )
    measured_at, machine = max(found, key=lambda pair: pair[0])
    return KeptMachine(machine=machine, measured_at=measured_at)


def num_usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_model(root: pathlib.Path = pathlib.Path("/")) -> str:
    """What the processor calls itself; `root` is where `proc` is mounted."""
    for line in text_of(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Processor", "cpu model") and value.strip():
            return value.strip()
    return os.uname().machine


def ram_total_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """All main memory; 0 where the system does not say."""
    return sizes_in(root / "proc/meminfo").get("MemTotal", 0)


def sizes_in(path: pathlib.Path) -> dict[str, int]:
    """Bytes by name, of lines of the form `Name:  123 kB`."""
    sizes = {}
    for line in text_of(path).splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            sizes[name.strip()] = int(words[0]) * KIB
    return sizes


def text_of(path: pathlib.Path) -> str:
    """A file of the system's; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
