"""Two machines with a link of set rate between them, acted out on this one.

Each is a network namespace with a host name and an address of its own; a pair of virtual cards is
the link, which sends no faster than its rate and can be cut. A process that has entered one sees no
other network, and not the directory of the other machine. Needs root. Nothing of it has a name
outside: it is gone when the last process in it has ended.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lohan.parallel.launch import card_towards

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_CARD = "cable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActedMachine:
    """One of both."""

    holder: int
    """The process that keeps its namespaces."""
    address: str
    directory: pathlib.Path
    """Its own drive."""
    meets_at: str
    """The address of the first one."""
    others: tuple[pathlib.Path, ...]
    """What it must not see."""

    def enter(self) -> None:
        """This process, which has one thread, is of that machine from here on."""
        for name, kind in (("net", _CLONE_NEWNET), ("uts", _CLONE_NEWUTS)):
            with open(f"/proc/{self.holder}/ns/{name}") as file:
                _done(_LIBC.setns(file.fileno(), kind), f"entering the {name} namespace")
        _done(_LIBC.unshare(_CLONE_NEWNS), "mounts of one's own")
        _run(["mount", "--make-rprivate", "/"])
        for other in self.others:
            _run(["mount", "-t", "tmpfs", "-o", "ro,size=4k", "none", str(other)])
        os.environ["GLOO_SOCKET_IFNAME"] = card_towards(self.meets_at)[0]

    def inside(self, words: Sequence[str]) -> str:
        """What a command prints that is run there."""
        return _run(["nsenter", "--target", str(self.holder), "--net", "--uts", *words])


@dataclass(frozen=True, slots=True)
class TwoMachines:
    """Both, and what is between them."""

    machines: tuple[ActedMachine, ActedMachine]

    def cut(self) -> None:
        """Pull the cable: whatever is sent from now on is lost, and nobody is told."""
        self.machines[1].inside(["ip", "link", "set", _CARD, "down"])

    def mend(self) -> None:
        """Put it back. Twice is fine."""
        self.machines[1].inside(["ip", "link", "set", _CARD, "up"])

    def carried_bytes(self) -> int:
        """What the link has carried so far, both ways."""
        (told,) = json.loads(self.machines[0].inside(["ip", "-s", "-j", "link", "show", _CARD]))
        return int(told["stats64"]["rx"]["bytes"] + told["stats64"]["tx"]["bytes"])


def why_not() -> str | None:
    """Why two machines cannot be acted out here, as a sentence; None: they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "two machines are acted out in network namespaces, which needs root on Linux"
    missing = [one for one in ("ip", "tc", "nsenter", "unshare", "mount") if not shutil.which(one)]
    if missing:
        return f"two machines are acted out with {', '.join(missing)}, not installed here"
    try:
        with linked(pathlib.Path("/nowhere"), bits_per_second=1e8):
            return None
    except OSError as error:
        return f"two machines cannot be acted out here: {error}"


@contextlib.contextmanager
def linked(root: pathlib.Path, *, bits_per_second: float) -> Iterator[TwoMachines]:
    """Make both; their directories are below `root`.

    Raises:
        OSError: the system does not let us.
    """
    directories = [root / f"machine{number}" for number in range(2)]
    with contextlib.ExitStack() as ends:
        machines = []
        for number, directory in enumerate(directories):
            words = ["unshare", "--net", "--uts", "sh", "-c"]
            # Ends when its input does: when nobody is left who could use it.
            script = f"hostname machine{number} && echo ready && exec cat"
            holder = ends.enter_context(
                subprocess.Popen(
                    [*words, script],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            ends.callback(holder.terminate)
            assert holder.stdout is not None
            assert holder.stderr is not None
            if holder.stdout.readline() != "ready\n":
                raise OSError(holder.stderr.read().strip())
            machines.append(
                ActedMachine(
                    holder=holder.pid,
                    address=f"10.77.0.{1 + number}",
                    meets_at="10.77.0.1",
                    directory=directory,
                    others=tuple(one for one in directories if one != directory),
                )
            )
        first, second = machines
        cable = ["ip", "link", "add", _CARD, "type", "veth", "peer", "name", _CARD]
        first.inside([*cable, "netns", str(second.holder)])
        rate = ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", "64kb", "latency", "100ms"]
        for one in machines:
            one.inside(["ip", "address", "add", f"{one.address}/30", "dev", _CARD])
            one.inside(["tc", "qdisc", "add", "dev", _CARD, "root", *rate])
            for card in ("lo", _CARD):
                one.inside(["ip", "link", "set", card, "up"])
        yield TwoMachines((first, second))


_LIBC = ctypes.CDLL(None, use_errno=True)


def _done(code: int, what: str) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
