"""The files the drives are measured on: made, written once, and gone afterwards whatever happens.

Owns a private directory in each SSD directory, one preallocated file in each, and the memory the
bytes come from. Timed writes then overwrite, as training does: the first write of new space is
slower. Takes no times; `disks.py` does.
"""

import contextlib
import errno
import os
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from lohan.errors import OutOfSpace, StorageError
from lohan.ssd import (
    Buffer,
    BufferPool,
    DirectoryReport,
    DriveSettings,
    IoEngine,
    IoFile,
    Priority,
    RunDirectories,
    Ticket,
)
from lohan.units import MIB, format_bytes

LEAST_BYTES = 64 * MIB
"""Of one file: on less a drive would be measured from its own cache."""
REQUEST_BYTES = 16 * MIB
_NUM_BUFFERS = 4
_NUM_FIRST_WRITES = 4
_RUN_PREFIX = "measure-"

EngineMaker = Callable[[], IoEngine]
"""Makes a fresh engine: a drive's settings cannot change once it was added to one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenProbe:
    """Probe files open through one engine, each behind a queue with its own settings."""

    engine: IoEngine
    files: tuple[IoFile, ...]
    settings: tuple[DriveSettings, ...]


class ProbeFiles:
    """One file per directory. A context manager; leaving it removes everything.

    Raises:
        OutOfSpace: a directory has no room for a file worth measuring.
        StorageError: a directory failed; nothing is left behind.
    """

    def __init__(
        self,
        reports: Sequence[DirectoryReport],
        make_engine: EngineMaker,
        *,
        most_bytes: int,
        least_bytes: int = LEAST_BYTES,
        request_bytes: int = REQUEST_BYTES,
    ) -> None:
        self.request_bytes = request_bytes
        self.file_bytes = _file_bytes(reports, most_bytes, least_bytes, request_bytes)
        self._make_engine = make_engine
        self._undo = contextlib.ExitStack()
        self._paths: list[str] = []
        self.written_bytes = 0
        """Everything written so far, for those who count what a drive endures."""
        with contextlib.ExitStack() as undo:
            self._buffers = self._make_buffers(undo)
            run_id = f"{_RUN_PREFIX}{uuid.uuid4().hex[:12]}"
            run = RunDirectories.create([report.path for report in reports], run_id)
            undo.callback(run.close, should_delete=True)
            for directory in run.paths:
                path = os.path.join(directory, "probe")
                # Before the file is made: a file nobody remembers would stay.
                undo.callback(_remove, path)
                self._paths.append(path)
            self._write_once()
            self._undo = undo.pop_all()

    @property
    def num_places(self) -> int:
        """Requests that fit in one file side by side."""
        return self.file_bytes // self.request_bytes

    @contextlib.contextmanager
    def open(
        self,
        settings: Sequence[DriveSettings],
        directories: Sequence[int],
        *,
        should_create: bool = False,
    ) -> Iterator[OpenProbe]:
        """Open some of the files through a fresh engine.

        On leaving, everything started has been carried out: the files can be removed.
        """
        engine = self._make_engine()
        files: list[IoFile] = []
        try:
            for number, wanted in zip(directories, settings, strict=True):
                drive = engine.add_drive(wanted)
                opened = engine.create_file if should_create else engine.open_file
                files.append(opened(self._paths[number], drive=drive))
            yield OpenProbe(engine=engine, files=tuple(files), settings=tuple(settings))
        finally:
            for file in files:
                engine.close_file(file)
            engine.close()

    def start(self, probe: OpenProbe, place: int, number: int, *, is_read: bool) -> Ticket:
        """Start one request at a place of the `number`-th open file. May block: no.

        Requests share buffers: what is read is thrown away, what is written is noise.
        """
        address = self._buffers[place % len(self._buffers)].address
        start = probe.engine.start_read if is_read else probe.engine.start_write
        if not is_read:
            self.written_bytes += self.request_bytes
        offset_bytes = place % self.num_places * self.request_bytes
        return start(
            probe.files[number], offset_bytes, address, self.request_bytes, Priority.BACKGROUND
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _make_buffers(self, undo: contextlib.ExitStack) -> list[Buffer]:
        pool = BufferPool("measure")
        undo.callback(pool.close)
        noise = np.random.default_rng()
        buffers = []
        for _ in range(_NUM_BUFFERS):
            buffer = pool.allocate(self.request_bytes)
            undo.callback(pool.take_back, buffer)
            # Noise, because some drives and filesystems compress.
            buffer.array()[:] = np.frombuffer(noise.bytes(self.request_bytes), dtype=np.uint8)
            buffers.append(buffer)
        return buffers

    def _write_once(self) -> None:
        numbers = range(len(self._paths))
        with self.open([DriveSettings()] * len(numbers), numbers, should_create=True) as probe:
            engine, files = probe.engine, probe.files
            for file in files:
                engine.resize(file, self.file_bytes)
            # A few at a time, so that a failure or Ctrl-C is not followed by gigabytes of writes.
            tickets: deque[Ticket] = deque()
            for place in range(self.num_places):
                for number in numbers:
                    if len(tickets) >= _NUM_FIRST_WRITES * len(files):
                        engine.wait(tickets.popleft())
                    tickets.append(self.start(probe, place, number, is_read=False))
            for ticket in tickets:
                engine.wait(ticket)
            for ticket in [engine.start_flush(file) for file in files]:
                engine.wait(ticket)


def _file_bytes(
    reports: Sequence[DirectoryReport], most_bytes: int, least_bytes: int, request_bytes: int
) -> int:
    """Length of each file: the same everywhere, and never more than half of what is free."""
    share = Counter(report.device for report in reports)
    wanted = most_bytes // len(reports)
    for report in reports:
        room_bytes = report.free_bytes // 2 // share[report.device]
        if room_bytes < max(least_bytes, request_bytes):
            needed = 2 * share[report.device] * max(least_bytes, request_bytes)
            raise OutOfSpace(
                f"{report.path} has {format_bytes(report.free_bytes)} free, measuring it needs "
                f"{format_bytes(needed)}",
                why="a drive is measured on files of its own, and half of what is free stays free",
                remedy="free some space there, or give another directory",
                path=report.path,
                errno=errno.ENOSPC,
            )
        wanted = min(wanted, room_bytes)
    return max(wanted // request_bytes, 1) * request_bytes


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(
            "a file made for measuring could not be removed",
            why=f"the system said {error.strerror}",
            remedy="remove its directory yourself; nothing in it matters",
            path=path,
            errno=error.errno,
        ) from None


def leftovers_in(reports: Sequence[DirectoryReport]) -> list[str]:
    """Directories a measurement that was killed has left behind: named, never touched."""
    found = []
    for report in reports:
        with contextlib.suppress(OSError):
            found += [
                entry.path
                for entry in os.scandir(report.path)
                if entry.name.startswith(f"lohan-{_RUN_PREFIX}")
            ]
    return sorted(found)
