"""Exports that are killed at every step of their life; run as a program of its own.

Usage: python -m support.killed_exports SOURCE OUT EVERY

Opens the source once, then forks: child n kills itself before its n-th call of the system that
changes a disk. Prints the number of calls, and for each child whether the output is there.
"""

import os
import pathlib
import signal
import sys
from typing import Any

import torch

from lohan.train.weights.export_hf import export_model
from lohan.train.weights.source import open_source

EVENTS = ("posix_fallocate", "pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir")


def _count_calls(kill_at: int | None) -> list[int]:
    calls = [0]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if calls[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            calls[0] += 1
            return real(*args, **kwargs)

        return call

    for name in EVENTS:
        setattr(os, name, counted(getattr(os, name)))
    return calls


def main() -> None:
    torch.set_num_threads(1)
    source, out, every = open_source(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
    tensors = dict(source.tensors())
    kill_at = 0
    while True:
        place = out / f"killed-at-{kill_at}"
        child = os.fork()
        if child == 0:
            _count_calls(kill_at)
            export_model(source, tensors.items(), place, max_shard_bytes=6000)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(kill_at, os.waitstatus_to_exitcode(status), int(place.exists()), flush=True)
        if os.waitstatus_to_exitcode(status) == 0:
            return
        kill_at += every


if __name__ == "__main__":
    main()
