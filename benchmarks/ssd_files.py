"""The files the SSD benchmark measures on, and the three ways to measure: ours, fio, plain reads.

Used by `ssd.py` beside it.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lohan.ssd import (
    Access,
    BufferPool,
    DriveSettings,
    Extent,
    IoEngine,
    RunDirectories,
    StripedFile,
    StripedTicket,
    add_drives,
    choose_engine,
)
from lohan.units import GB, MIB

REQUEST_BYTES = 32 * MIB
NUM_REQUESTS = 8
RAMP_MILLISECONDS = 300
# Files of up to this many directories are equally long when the size is a multiple of it.
SIZE_STEP_BYTES = 3 * REQUEST_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measurement."""

    bytes_per_second: float
    cpu_seconds_per_gb: float


class Stripes:
    """Files over some directories, written once, that every measurement uses again."""

    def __init__(self, directories: Sequence[str], size_bytes: int) -> None:
        self.directories = directories
        # Enough places that no range is written again while it is still in flight.
        size_bytes = max(size_bytes, 2 * NUM_REQUESTS * REQUEST_BYTES)
        self.size_bytes = -(-size_bytes // SIZE_STEP_BYTES) * SIZE_STEP_BYTES
        self.num_places = self.size_bytes // REQUEST_BYTES
        self.run = RunDirectories.create(directories, f"bench-{uuid.uuid4().hex[:8]}")
        self.pool = BufferPool("bench")
        self.buffers = [self.pool.allocate(REQUEST_BYTES) for _ in range(NUM_REQUESTS)]
        for buffer in self.buffers:
            buffer.view[:] = os.urandom(MIB) * (REQUEST_BYTES // MIB)
        self.engine, self.reason = choose_engine()
        self._saved: dict[str, Any] | None = None

    @contextlib.contextmanager
    def opened(
        self, engine: IoEngine, settings: DriveSettings, *, should_checksum: bool = False
    ) -> Iterator[tuple[StripedFile, Extent]]:
        """The file through an engine, with these limits of its drive."""
        count = len(self.directories)
        if self._saved is None:
            file = StripedFile.create(
                self.run,
                name="bench",
                engine=engine,
                capacity_bytes=self.size_bytes,
                drives=add_drives(engine, self.run.paths, [settings] * count),
                should_checksum=should_checksum,
            )
            file.allocate(self.size_bytes)
            self._saved = {
                "name": file.name,
                "layout": file.layout,
                "extents": file.extents,
                "checksums": file.checksums.stretches(),
            }
        else:
            drives = add_drives(engine, self.run.paths, [settings] * count)
            file = StripedFile.attach(
                self.run,
                engine=engine,
                drives=drives,
                should_checksum=should_checksum,
                **self._saved,
            )
        try:
            yield file, file.extents[0]
        finally:
            file.close()

    def measure(
        self,
        operation: str,
        settings: DriveSettings,
        seconds: float,
        *,
        is_uring: bool | None = None,
        should_checksum: bool = False,
        num_ahead: int = NUM_REQUESTS,
    ) -> Figure:
        """Move requests through the queue for `seconds`; the queue cuts them into blocks.

        `num_ahead` requests are started before the first is waited for.
        """
        if is_uring is None:
            is_uring = self.engine.name == "io_uring"
        engine = IoEngine(is_uring=is_uring)
        try:
            with self.opened(engine, settings, should_checksum=should_checksum) as (file, extent):
                return self._transfer(file, extent, operation, seconds, num_ahead)
        finally:
            engine.close()

    def _transfer(
        self,
        file: StripedFile,
        extent: Extent,
        operation: str,
        seconds: float,
        num_ahead: int,
    ) -> Figure:
        tickets: list[StripedTicket] = []
        num_places = self.num_places
        started, cpu_started = time.perf_counter(), time.process_time()
        number = 0
        while time.perf_counter() - started < seconds or number < num_ahead:
            if number >= num_ahead:
                tickets[number - num_ahead].wait()
            # Further ahead than there are buffers, reads share them: nobody looks at the bytes.
            buffer = self.buffers[number % NUM_REQUESTS]
            place = number % num_places
            is_read = operation == "read" or (operation == "mixed" and number % 2 == 0)
            if operation == "mixed":
                # Reads go through one half of the file and writes through the other.
                half = max(1, num_places // 2)
                place = number // 2 % half + (0 if is_read else num_places - half)
            start = file.start_read if is_read else file.start_write
            tickets.append(
                start(
                    extent,
                    address=buffer.address,
                    nbytes=REQUEST_BYTES,
                    offset_bytes=place * REQUEST_BYTES,
                )
            )
            number += 1
        for ticket in tickets[-num_ahead:]:
            ticket.wait()
        elapsed = time.perf_counter() - started
        moved = number * REQUEST_BYTES
        cpu_seconds = time.process_time() - cpu_started
        return Figure(bytes_per_second=moved / elapsed, cpu_seconds_per_gb=cpu_seconds / moved * GB)

    def write_once(self) -> float:
        """Write all new space; returns bytes per second."""
        started = time.perf_counter()
        with self.opened(self.engine, DriveSettings()) as (file, extent):
            for place in range(self.num_places):
                file.start_write(
                    extent,
                    address=self.buffers[0].address,
                    nbytes=REQUEST_BYTES,
                    offset_bytes=place * REQUEST_BYTES,
                ).wait()
            file.start_flush().wait()
            self.paths = file.paths
            self.accesses: tuple[Access, ...] = file.accesses
        return self.size_bytes / (time.perf_counter() - started)

    def fio(self, operation: str, block_bytes: int, depth: int, seconds: float) -> Figure | None:
        """The same setting with fio on the same files, or None where it is not installed."""
        if shutil.which("fio") is None:
            return None
        kind = {"read": "read", "write": "write", "mixed": "rw"}[operation]
        command = [
            "fio", "--name=bench", f"--filename={':'.join(self.paths)}", f"--rw={kind}",
            f"--bs={block_bytes}", f"--iodepth={depth}", f"--size={self.size_bytes}",
            "--ioengine=io_uring", "--direct=1", "--time_based", "--allow_file_create=0",
            f"--runtime={int(seconds * 1000)}ms", "--output-format=json",
            # What makes fio fastest: buffers pinned once and left alone, its start-up not counted.
            "--fixedbufs=1", "--scramble_buffers=0", f"--ramp_time={RAMP_MILLISECONDS}ms",
        ]  # fmt: skip
        if self.engine.name != "io_uring":
            command = [word for word in command if word != "--fixedbufs=1"]
            command[command.index("--ioengine=io_uring")] = "--ioengine=libaio"
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"fio failed: {done.stderr.strip()}", file=sys.stderr)
            return None
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        rate = job["read"]["bw_bytes"] + job["write"]["bw_bytes"]
        cpu_share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Figure(
            bytes_per_second=rate, cpu_seconds_per_gb=cpu_share * GB / rate if rate else 0.0
        )

    def plain_reads(self, block_bytes: int, seconds: float) -> float:
        """As `dd iflag=direct`: one synchronous read after another; bytes per second."""
        descriptor = os.open(self.paths[0], os.O_RDONLY | os.O_DIRECT)
        try:
            num_places = os.fstat(descriptor).st_size // block_bytes
            view = self.buffers[0].view[:block_bytes]
            number, started = 0, time.perf_counter()
            while time.perf_counter() - started < seconds:
                if os.preadv(descriptor, [view], number % num_places * block_bytes) != len(view):
                    raise RuntimeError("a plain read was short")
                number += 1
            return number * block_bytes / (time.perf_counter() - started)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Delete the files."""
        if self._saved is not None:
            file = StripedFile.attach(self.run, engine=self.engine, **self._saved)
            file.close(should_delete=True)
        self.run.close(should_delete=True)
        for buffer in self.buffers:
            self.pool.take_back(buffer)
        self.pool.close()
        self.engine.close()
