"""Engines and memory for tests of bytes on SSDs: one of each engine this machine has."""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from lohan import _native
from lohan.ssd import Buffer, BufferPool, DriveId, DriveSettings, IoEngine, IoFile
from support.memory_engine import MemoryEngine
from support.paced_engine import LinkRates, PacedEngine

PAGE = 4096

MAKERS: dict[str, Callable[[], IoEngine]] = {
    "io_uring": lambda: IoEngine(is_uring=True),
    "threads": lambda: IoEngine(is_uring=False),
    "memory": MemoryEngine,
    "paced": lambda: PacedEngine(
        IoEngine(is_uring=False),
        LinkRates(read_bytes_per_second=1e11, write_bytes_per_second=1e11, is_duplex=False),
    ),
}
NATIVE = ("io_uring", "threads")


def make_engine(name: str) -> IoEngine:
    if name == "io_uring" and (number := _native.probe_uring()):
        pytest.skip(f"io_uring is refused here: {os.strerror(number)}")
    return MAKERS[name]()


def random_bytes(nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def num_open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def nothing_leaks() -> Iterator[None]:
    """Fail if descriptors, native threads or Python threads are left over."""

    def count() -> tuple[int, int, int]:
        return num_open_descriptors(), num_threads(), threading.active_count()

    def is_more() -> bool:
        return any(now > then for now, then in zip(count(), before, strict=True))

    before = count()
    yield
    # Workers the kernel started for a ring leave a moment after the ring is closed.
    deadline = time.monotonic() + 100
    while is_more() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not is_more(), f"descriptors, threads, Python threads: {before} became {count()}"


class Bench:
    """An engine with one drive, one file and a pool: what most tests start from."""

    def __init__(self, engine: IoEngine, path: str, settings: DriveSettings, nbytes: int) -> None:
        self.engine = engine
        self.drive: DriveId = engine.add_drive(settings)
        self.path = path
        self.file: IoFile = engine.create_file(path, drive=self.drive)
        if nbytes:
            engine.resize(self.file, nbytes)
        self.pool = BufferPool("test")
        self.buffers: list[Buffer] = []

    def buffer(self, nbytes: int, fill: npt.NDArray[np.uint8] | int = 0) -> Buffer:
        buffer = self.pool.allocate(nbytes)
        buffer.array()[:] = fill
        self.buffers.append(buffer)
        return buffer

    def close(self) -> None:
        self.engine.close_file(self.file)
        self.engine.close()
        for buffer in self.buffers:
            self.pool.take_back(buffer)
        self.pool.close()


def cut_short(engine: IoEngine, path: str, nbytes: int) -> None:
    """Truncate a file behind the back of whoever has it open."""
    if isinstance(engine, MemoryEngine):
        engine.resize(engine.open_file(path, drive=DriveId(0)), nbytes)
    else:
        os.truncate(path, nbytes)


def error_numbers() -> tuple[int, ...]:
    return (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENODEV)
