"""The emulated device: a GPU made of main memory, threads and clocks, for tests and measurements.

Owns bounded memory of its own, two copy lanes at set rates, a compute queue with a set speed, and
the poison that makes a missing wait or an early reuse visible (`copy_lane.py`, "Late bytes").
Compute itself runs on ordinary CPU tensors, bit for bit as on the cpu device; why it is not a
torch device of its own is told in docs/decisions/0009-emulated-device.md.
"""

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from lohan.device.copy_lane import (
    Clock,
    ComputeEvent,
    CopyEvent,
    CopyLane,
    EmulatedEvent,
    poison,
)
from lohan.device.cpu import HostDevice
from lohan.device.device import CopyEnd, Event, foreign_event
from lohan.device.memory import DeviceMemory, Span, check_ends, wrong_side
from lohan.device.storages import CountedCompute, StorageBook
from lohan.errors import ConfigError, HardwareError, bug
from lohan.vocabulary import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRates:
    """How fast the emulated device is; None is as fast as this machine can."""

    gpu_to_ram_bytes_per_second: float | None = None
    ram_to_gpu_bytes_per_second: float | None = None
    flops_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    """Rate of the device's own memory, for compute that is bound by it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            rate = getattr(self, field.name)
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ConfigError(
                    f"{field.name} is {rate}",
                    why="a rate must be above zero and finite",
                    remedy="give a positive rate, or None for as fast as this machine can",
                )


class _ComputeQueue:
    """When compute would end on the emulated device. Safe from any thread."""

    def __init__(self, clock: Clock, rates: EmulatedRates) -> None:
        self._clock, self._rates = clock, rates
        self._lock = threading.Lock()
        # Work since the last charge began here: not before the work charged last was over, and
        # not before what it waited for had come.
        self._piece_start_seconds = 0.0

    def enter(self) -> None:
        """Begin a piece of work now, or when earlier work is over."""
        self.starts_after(self._clock.now_seconds())

    def starts_after(self, seconds: float) -> None:
        """Put off the work that is charged next."""
        with self._lock:
            self._piece_start_seconds = max(self._piece_start_seconds, seconds)

    def charge(self, num_flops: float, num_bytes: float, fixed_seconds: float) -> None:
        """End a piece of work: it takes the time it took, or the time it would take if longer."""
        flops_rate, bytes_rate = self._rates.flops_per_second, self._rates.memory_bytes_per_second
        charged_seconds = max(
            num_flops / flops_rate if flops_rate is not None else 0.0,
            num_bytes / bytes_rate if bytes_rate is not None else 0.0,
        )
        if flops_rate is not None:
            charged_seconds += fixed_seconds
        with self._lock:
            due_seconds = self._piece_start_seconds + charged_seconds
            self._piece_start_seconds = max(due_seconds, self._clock.now_seconds())

    def end_seconds(self) -> float:
        """When all work so far is over: what is not charged is over already."""
        with self._lock:
            return self._piece_start_seconds


class EmulatedDevice(HostDevice):
    """A stand-in for a GPU, with set rates and poisoned memory."""

    shares_ram = False

    def __init__(
        self,
        *,
        memory_bytes: int | None = None,
        rates: EmulatedRates | None = None,
        clock: Clock | None = None,
        poisons: bool = True,
        reason: str = "asked for",
    ) -> None:
        """Start the two lane threads; `close` ends them.

        `poisons` False saves the time of filling memory with NaN, for measurements of speed.
        """
        super().__init__("emulated", reason, memory_bytes)
        self.rates = rates or EmulatedRates()
        self._clock = clock or Clock()
        self._book = StorageBook(self._ledger)
        self._compute = _ComputeQueue(self._clock, self.rates)
        self._slots: dict[int, DeviceMemory] = {}
        self._slots_lock = threading.Lock()
        self._poisons = poisons
        self._stop = threading.Event()
        self._lanes = {
            lane: CopyLane(
                lane,
                bytes_per_second=rate,
                clock=self._clock,
                poisons=poisons,
                stop=self._stop,
            )
            for lane, rate in (
                (Lane.GPU_TO_RAM, self.rates.gpu_to_ram_bytes_per_second),
                (Lane.RAM_TO_GPU, self.rates.ram_to_gpu_bytes_per_second),
            )
        }

    def alloc(self, nbytes: int) -> DeviceMemory:
        """Return poisoned memory: what was never written reads as NaN."""
        memory = super().alloc(nbytes)
        if self._poisons:
            poison(memory.address, nbytes)
        with self._slots_lock:
            self._slots[id(memory)] = memory
        return memory

    def free(self, memory: DeviceMemory, *, is_idle: bool = False) -> None:
        """Poison the memory and give it back: views that live on read NaN."""
        flat = memory.bytes()  # kept until it is poisoned
        with self._slots_lock:
            if self._slots.pop(id(memory), None) is None:
                raise bug(
                    f"{memory.nbytes} bytes to free were not allocated by this emulated device",
                    HardwareError,
                )
        memory.invalidate()
        if self._poisons:
            poison(flat.data_ptr(), memory.nbytes)
        self._ledger.return_slot(memory.nbytes)

    def copy_async(
        self, dst: CopyEnd, src: CopyEnd, *, lane: Lane, after: Sequence[Event] = ()
    ) -> Event:
        """Queue a copy on the thread of its lane. Never blocks."""
        self._check_open()
        dst_span, src_span = check_ends(dst, src, lane)
        self._check_is_ram(src_span if lane is Lane.RAM_TO_GPU else dst_span, lane)
        events = tuple(self._own(event) for event in after)
        return self._lanes[lane].submit(dst_span, src_span, events)

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Compute on the calling thread, counting what it allocates."""
        self._check_open()
        self._compute.enter()
        with CountedCompute(self._book):
            yield

    def charge(
        self, *, num_flops: float = 0.0, num_bytes: float = 0.0, fixed_seconds: float = 0.0
    ) -> None:
        """Advance the clock of compute. Never blocks: events and waits are what become later."""
        self._compute.charge(num_flops, num_bytes, fixed_seconds)

    def record(self) -> Event:
        """Return the point at which what was charged so far is over."""
        return ComputeEvent(self._clock, self._compute.end_seconds())

    def compute_waits(self, event: Event) -> None:
        """Block the host too: compute runs inside its calls here."""
        own = self._own(event)
        if isinstance(own, CopyEvent):
            self._compute.starts_after(own.block())

    def wait(self, event: Event) -> None:
        """Block the calling thread until the event is done."""
        own = self._own(event)
        if isinstance(own, CopyEvent):
            own.block()
        else:
            self._clock.sleep_until(own.done_seconds, self._stop)

    def synchronize(self) -> None:
        """Block until lanes and compute are idle."""
        for lane in self._lanes.values():
            lane.drain()
        self._clock.sleep_until(self._compute.end_seconds(), self._stop)

    def close(self) -> None:
        """Stop both lanes, then poison all memory that was not freed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.set()
        for lane in self._lanes.values():
            lane.join()
        self._unpin_all()
        for memory in list(self._slots.values()):
            self.free(memory)

    def _check_is_ram(self, span: Span, lane: Lane) -> None:
        with self._slots_lock:
            slots = [Span.of(memory) for memory in self._slots.values()]
        if any(span.overlaps(slot) for slot in slots):
            raise wrong_side(lane, "device memory", "main memory")

    def _own(self, event: Event) -> EmulatedEvent:
        if isinstance(event, (ComputeEvent, CopyEvent)):
            return event
        raise foreign_event(event, self.name)
