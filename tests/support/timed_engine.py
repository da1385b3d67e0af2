"""Drives with known rates on a clock that moves only when they work: figures are exact."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from lohan.ssd import DriveId, DriveSettings, IoFile, Operation, Priority, Ticket
from support.memory_engine import MemoryEngine


class HandClock:
    """Reads as a function; moved by whoever pretends to work. Also a clock for emulated devices."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds

    def now_seconds(self) -> float:
        return self.seconds

    def sleep_until(self, deadline_seconds: float, stop: threading.Event) -> None:
        with self._lock:
            self.seconds = max(self.seconds, deadline_seconds)


@dataclass(slots=True, kw_only=True)
class TimedDrive:
    """How long a request takes, alone in the world."""

    read_per_second: float = 2e9
    write_per_second: float = 1e9
    factor: Callable[[DriveSettings], float] = lambda settings: 1.0
    """Of the rates, by the settings of the queue."""
    slow_after_bytes: int | None = None
    """Writes beyond these take ten times as long: the fast cache is full."""
    written_bytes: int = 0

    def seconds_of(self, operation: Operation, nbytes: int, settings: DriveSettings) -> float:
        rate = self.read_per_second
        if operation is Operation.WRITE:
            self.written_bytes += nbytes
            rate = self.write_per_second
            if self.slow_after_bytes is not None and self.written_bytes > self.slow_after_bytes:
                rate /= 10
        return nbytes / (rate * self.factor(settings))


@dataclass(slots=True, kw_only=True)
class TimedDisk:
    """What all engines of one test share: the bytes, the clock, the drives by part of their path.

    Each drive works off its requests one after another (on a duplex disk, each direction), beside
    the other drives; waiting moves the clock to where a request ends.
    """

    clock: HandClock
    drives: dict[str, TimedDrive]
    is_duplex: bool = False
    memory: MemoryEngine = field(default_factory=MemoryEngine)
    busy_until: dict[tuple[str, Operation | None], float] = field(default_factory=dict)
    num_engines: int = 0
    num_open: int = 0

    def make_engine(self) -> "TimedEngine":
        self.num_engines += 1
        self.num_open += 1
        return TimedEngine(self)

    def drive_of(self, path: str) -> str:
        return next(name for name in self.drives if f"/{name}/" in path)


class TimedEngine:
    """`IoEngine` on memory; a request ends when its drive has had time for it."""

    def __init__(self, disk: TimedDisk) -> None:
        self._disk = disk
        self._settings: list[DriveSettings] = []
        self._ends: dict[int, float] = {}
        self._is_open = True
        self._tickets: list[Ticket] = []  # alive, so that their ids stay unique

    name = "timed"

    def add_drive(self, settings: DriveSettings) -> DriveId:
        self._settings.append(settings)
        self._disk.memory.add_drive(settings)
        return DriveId(len(self._settings) - 1)

    def create_file(self, path: str, *, drive: DriveId) -> IoFile:
        return self._disk.memory.create_file(path, drive=drive)

    def open_file(self, path: str, *, drive: DriveId) -> IoFile:
        return self._disk.memory.open_file(path, drive=drive)

    def resize(self, file: IoFile, nbytes: int) -> None:
        self._disk.memory.resize(file, nbytes)

    def close_file(self, file: IoFile) -> None:
        self._disk.memory.close_file(file)

    def start_read(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> Ticket:
        ticket = self._disk.memory.start_read(file, offset_bytes, address, nbytes, priority)
        return self._enter(ticket, Operation.READ, file, nbytes)

    def start_write(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> Ticket:
        ticket = self._disk.memory.start_write(file, offset_bytes, address, nbytes, priority)
        return self._enter(ticket, Operation.WRITE, file, nbytes)

    def start_flush(self, file: IoFile) -> Ticket:
        return self._disk.memory.start_flush(file)

    def wait(self, ticket: Ticket) -> None:
        self._disk.memory.wait(ticket)
        end = self._ends.pop(id(ticket), 0.0)
        clock = self._disk.clock
        clock.seconds = max(clock.seconds, end)

    def close(self) -> None:
        self._disk.num_open -= self._is_open
        self._is_open = False

    def _enter(self, ticket: Ticket, operation: Operation, file: IoFile, nbytes: int) -> Ticket:
        disk = self._disk
        name = disk.drive_of(file.path)
        queue = (name, operation if disk.is_duplex else None)
        start = max(disk.clock.seconds, disk.busy_until.get(queue, 0.0))
        settings = self._settings[file.drive]
        end = start + disk.drives[name].seconds_of(operation, nbytes, settings)
        disk.busy_until[queue] = end
        self._ends[id(ticket)] = end
        self._tickets.append(ticket)
        return ticket
