"""An engine that goes wrong on command: the N-th request fails, is cut short, delayed or corrupted.

Sits in front of a real engine and keeps its contract (one answer per ticket, memory free when
done), so that whatever is built on an `IoEngine` can be shown every trouble at every place.
"""

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from lohan import _native
from lohan.errors import StorageError
from lohan.ssd import (
    ALIGNMENT_BYTES,
    DriveId,
    DriveSettings,
    IoEngine,
    IoFile,
    Operation,
    Priority,
    Ticket,
)
from lohan.ssd.engines.storage_errors import short_transfer, storage_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request does nothing and ends with this errno."""

    errno: int


@dataclass(frozen=True, slots=True)
class Shorten:
    """Only the first page moves; then there is no more progress."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The request starts only when somebody waits for it, or a flush has to come after it."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One bit of the bytes that are read or written is wrong, and nobody says so."""


Fault = Fail | Shorten | Delay | Damage


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One request among those of its kind: lanes run ahead of each other in ever other ways, so a
    number alone is another request in every run."""

    phase: str
    operation: Operation
    file_name: str
    occurrence: int
    """From 0, within the phase."""


@dataclass(slots=True, kw_only=True, eq=False)
class FaultTicket:
    operation: Operation
    file: IoFile
    offset_bytes: int
    address: int
    asked_bytes: int
    priority: Priority
    place: Place
    fault: Fault | None
    inner: Ticket | None = None
    error: StorageError | None = None
    held_memory: _native.AlignedMemory | None = None
    is_damaged: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class FaultEngine:
    """`IoEngine` over another one. Requests are numbered from 1 in the order they are started.

    `phase` is set by who runs it, and told apart in the places of requests; `setup_faults` numbers
    the calls of `create_file`, `open_file` and `resize` together.
    """

    def __init__(
        self,
        inner: IoEngine,
        *,
        faults: Mapping[int | Place, Fault] | None = None,
        setup_faults: Mapping[int, Fail] | None = None,
    ) -> None:
        self.inner = inner
        self.faults = dict(faults or {})
        self.setup_faults = dict(setup_faults or {})
        self.num_requests = 0
        self.phase = ""
        self.num_setup_calls = 0
        self.tickets: list[FaultTicket] = []
        self._lock = threading.Lock()
        self._num_alike: Counter[tuple[str, Operation, str]] = Counter()

    @property
    def name(self) -> str:
        return f"faulty {self.inner.name}"

    def add_drive(self, settings: DriveSettings) -> DriveId:
        return self.inner.add_drive(settings)

    def create_file(self, path: str, *, drive: DriveId) -> IoFile:
        self._fail_setup(path)
        return self.inner.create_file(path, drive=drive)

    def open_file(self, path: str, *, drive: DriveId) -> IoFile:
        self._fail_setup(path)
        return self.inner.open_file(path, drive=drive)

    def resize(self, file: IoFile, nbytes: int) -> None:
        self._fail_setup(file.path)
        self.inner.resize(file, nbytes)

    def free_bytes(self, directory: str) -> int:
        return self.inner.free_bytes(directory)

    def file_bytes(self, file: IoFile) -> int:
        return self.inner.file_bytes(file)

    def is_in_place(self, file: IoFile) -> bool:
        return self.inner.is_in_place(file)

    def remove_file(self, file: IoFile) -> bool:
        return self.inner.remove_file(file)

    def close_file(self, file: IoFile) -> None:
        self.inner.close_file(file)

    def start_read(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> FaultTicket:
        return self._start(Operation.READ, file, offset_bytes, address, nbytes, priority)

    def start_write(
        self, file: IoFile, offset_bytes: int, address: int, nbytes: int, priority: Priority
    ) -> FaultTicket:
        return self._start(Operation.WRITE, file, offset_bytes, address, nbytes, priority)

    def start_flush(self, file: IoFile) -> FaultTicket:
        with self._lock:
            held = [ticket for ticket in self.tickets if isinstance(ticket.fault, Delay)]
        for ticket in held:
            self._launch(ticket)
        return self._start(Operation.FLUSH, file, 0, 0, 0, Priority.WRITE_BACK)

    def is_done(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, FaultTicket)
        if ticket.inner is None:
            return ticket.error is not None
        return self.inner.is_done(ticket.inner)

    def wait(self, ticket: Ticket) -> None:
        assert isinstance(ticket, FaultTicket)
        if ticket.error is None:
            self._launch(ticket)
        if ticket.inner is not None:
            self.inner.wait(ticket.inner)
        if isinstance(ticket.fault, Damage) and ticket.operation is Operation.READ:
            with ticket.lock:
                if not ticket.is_damaged:
                    _flip_a_bit(ticket.address, ticket.asked_bytes)
                    ticket.is_damaged = True
        if ticket.error is not None:
            raise ticket.error

    def counters(self, drive: DriveId) -> _native.DriveCounters:
        return self.inner.counters(drive)

    def close(self) -> None:
        for ticket in self.tickets:
            self._launch(ticket)
        self.inner.close()

    def _fail_setup(self, path: str) -> None:
        self.num_setup_calls += 1
        fault = self.setup_faults.get(self.num_setup_calls)
        if fault is not None:
            raise storage_error("a call was made to fail", fault.errno, path=path)

    def _start(
        self,
        operation: Operation,
        file: IoFile,
        offset_bytes: int,
        address: int,
        nbytes: int,
        priority: Priority,
    ) -> FaultTicket:
        with self._lock:
            self.num_requests += 1
            kind = (self.phase, operation, os.path.basename(file.path))
            place = Place(
                phase=kind[0],
                operation=kind[1],
                file_name=kind[2],
                occurrence=self._num_alike[kind],
            )
            self._num_alike[kind] += 1
            fault = self.faults.get(self.num_requests, self.faults.get(place))
            ticket = FaultTicket(
                operation=operation,
                file=file,
                offset_bytes=offset_bytes,
                address=address,
                asked_bytes=nbytes,
                priority=priority,
                place=place,
                fault=fault,
            )
            self.tickets.append(ticket)
        if isinstance(fault, Fail):
            ticket.error = storage_error(
                f"a {operation.name.lower()} failed",
                fault.errno,
                path=file.path,
                offset_bytes=offset_bytes,
                asked_bytes=nbytes,
                got_bytes=0,
            )
        elif not isinstance(fault, Delay):
            self._launch(ticket)
        return ticket

    def _launch(self, ticket: FaultTicket) -> None:
        with ticket.lock:
            if ticket.inner is not None or ticket.error is not None:
                return
            if ticket.operation is Operation.FLUSH:
                ticket.inner = self.inner.start_flush(ticket.file)
                return
            address, nbytes = ticket.address, ticket.asked_bytes
            if isinstance(ticket.fault, Shorten):
                nbytes = ALIGNMENT_BYTES
                ticket.error = short_transfer(
                    f"a {ticket.operation.name.lower()}",
                    path=ticket.file.path,
                    offset_bytes=ticket.offset_bytes,
                    asked_bytes=ticket.asked_bytes,
                    got_bytes=nbytes,
                )
            if isinstance(ticket.fault, Damage) and ticket.operation is Operation.WRITE:
                ticket.held_memory = _native.AlignedMemory(nbytes, True)
                ctypes.memmove(ticket.held_memory.address, address, nbytes)
                address = ticket.held_memory.address
                _flip_a_bit(address, nbytes)
            is_read = ticket.operation is Operation.READ
            start = self.inner.start_read if is_read else self.inner.start_write
            ticket.inner = start(ticket.file, ticket.offset_bytes, address, nbytes, ticket.priority)


def _flip_a_bit(address: int, nbytes: int) -> None:
    byte = (ctypes.c_ubyte * nbytes).from_address(address)
    byte[nbytes // 2] ^= 0x10
