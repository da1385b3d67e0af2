"""Starting the ranks of a command: torchrun's launcher, which runs the same command in each.

Owns the launcher's settings and how its end is told. Called by `lohan train --gpus`.
"""

import logging
import os
import signal
import sys
import uuid

from lohan.errors import ConfigError

_SECONDS_TO_SEAL = 3600
"""After a signal: how long ranks may take for the step they are in, and for its seal."""


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several."""
    return "LOCAL_RANK" in os.environ


def launch_ranks(num_here: int, *, num_machines: int = 1, rendezvous: str | None = None) -> int:
    """Run this process' own command line as so many ranks; the exit code of the first that failed.

    A signal goes to all ranks, which seal and end. May block: until all have ended.

    Args:
        num_here: ranks of this machine.
        rendezvous: HOST:PORT of one of the machines, where all of them meet.

    Raises:
        ConfigError: several machines, and no place where they meet.
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
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=_SECONDS_TO_SEAL,
    )
    # What a rank failed with it says itself.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
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
