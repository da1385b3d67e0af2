"""Starting the ranks of a command: torchrun's launcher, which runs the same command in each.

Owns the launcher's settings and how its end is told. Called by `lohan train --gpus`.
"""

import contextlib
import fcntl
import logging
import os
import pathlib
import signal
import socket
import struct
import sys
import threading
import time
import uuid

from lohan.errors import ConfigError

_SIOCGIFADDR = 0x8915
_SECONDS_TO_SEAL = 3600
"""After a signal: how long ranks may take for the step they are in, and for its seal."""


_SECONDS_CUT_OFF = 30.0
"""The launcher asks all the time how its ranks are: one that ended so long ago was not asked."""


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "LOCAL_RANK" in os.environ


def card_towards(host: str) -> tuple[str, str]:
    """The network card by which this machine reaches a host, and its address there.

    Gloo takes the card that the machine's own name stands for, which is often none that others
    reach.

    Raises:
        ConfigError: there is no way to that host.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                wish = struct.pack("256s", name.encode())
                try:
                    told = fcntl.ioctl(probe, _SIOCGIFADDR, wish)
                except OSError:
                    continue  # a card without an address
                if socket.inet_ntoa(told[20:24]) == address:
                    return name, address
    except OSError as error:
        raise ConfigError(
            f"{host} cannot be reached from this machine ({error})",
            why="the ranks of all machines meet there",
            remedy="give --rendezvous HOST:PORT of a machine that all of them reach",
        ) from error
    raise ConfigError(
        f"no network card here has the address {address}, by which {host} is reached",
        why="ranks talk to those of other machines through one",
        remedy="name the card in GLOO_SOCKET_IFNAME",
    )


def launch_ranks(num_here: int, *, num_machines: int = 1, rendezvous: str | None = None) -> int:
    """Run this process' own command line as so many ranks; the exit code of the first that failed.

    A signal goes to all ranks, which seal and end. May block: until all have ended.

    Args:
        num_here: ranks of this machine.
        rendezvous: HOST:PORT of one of the machines, where all of them meet.

    Raises:
        ConfigError: several machines, and no place where they meet, or no way to it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if num_machines > 1 and rendezvous is None:
        raise ConfigError(
            f"{num_machines} machines were asked for, and no place where they meet",
            why="each of them starts its own ranks, which have to find each other",
            remedy="give the same --rendezvous HOST:PORT on all of them, of one of them",
        )
    own_address, meeting = None, {}
    if num_machines > 1 and rendezvous is not None:
        host = rendezvous.rpartition(":")[0] or rendezvous
        card, own_address = card_towards(host)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", card)
        if not own_address.startswith("127."):
            # Else guessed by the machine's own name, which need not stand for this address.
            meeting["is_host"] = socket.gethostbyname(host) == own_address
    # Each rank computes with its share of the cores, as torchrun and accelerate have it.
    num_cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num_here)))
    settings = LaunchConfig(
        min_nodes=num_machines,
        max_nodes=num_machines,
        nproc_per_node=num_here,
        run_id=f"lohan-{rendezvous}" if rendezvous else str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous or "localhost:0",
        rdzv_configs=meeting,
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=_SECONDS_TO_SEAL,
        local_addr=own_address,
    )
    # What a rank failed with it says itself.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if num_machines > 1:
        threading.Thread(target=_end_when_cut_off, name="lohan launcher", daemon=True).start()
    try:
        elastic_launch(settings, sys.executable)(*sys.argv)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        sys.stderr.write(f"rank {rank} was the first to end, with exit code {first.exitcode}\n")
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)
    return 0


def _end_when_cut_off() -> None:
    """End this process if its launcher hangs: it asks the other machines all the time, and where
    the link to them is cut it waits for minutes, and sees no rank end. Runs on: its own thread."""
    since: float | None = None
    while since is None or time.monotonic() < since + _SECONDS_CUT_OFF:
        time.sleep(1.0)
        since = (since or time.monotonic()) if _has_ended_rank() else None
    sys.stderr.write("a rank has ended, and the other machines do not answer\n")
    sys.stderr.flush()
    os._exit(1)


def _has_ended_rank() -> bool:
    """Whether a child of this process has ended and nobody has asked how."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children = pathlib.Path(f"/proc/self/task/{task}/children").read_text().split()
            for child in children:
                told = pathlib.Path(f"/proc/{child}/stat").read_text()
                if told.rpartition(")")[2].split()[0] == "Z":
                    return True
    return False
