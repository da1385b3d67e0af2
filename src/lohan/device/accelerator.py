"""Any accelerator torch knows, by torch's common interface: streams, events, pinned memory.

Owns two copy streams beside torch's default stream, which is the compute queue: the default one, so
that work of any thread lands in it without being told. Memory comes from torch's caching allocator,
held to the budget by it. What a vendor does its own way is `vendors.py`; rules that are not about
accelerators live in `device.py` and `memory.py`.

Note "Memory of no queue". The allocator knows which stream memory was made on, and orders its reuse
by that stream alone. Memory of `alloc` is made on a stream that never has work. So a copy into it
waits for nothing, whatever compute has queued; and it is handed out again when compute that was
queued before its end is over (`record_stream`) and copies from or to it are (`CopyEnds`). What
is freed as idle does not wait for compute: the next block may be queued by then, and a third buffer
for weights would be taken where two are planned.
A copy that compute was made to wait for need not keep its end alive: what uses the memory next
comes after compute, by `record_stream` or by the order of the compute stream's own pool.

Note "The first failure". A kernel fails after its call has returned, and from then on every call to
the device fails, also those that only clean up. The first failure that is seen is raised, and named
by whatever fails later; what cleans up (`synchronize`, `free`, `unpin`, `close`) is quiet then.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lohan.device.device import CopyEnd, Device, Event, foreign_event
from lohan.device.memory import (
    DeviceMemory,
    allocate_flat,
    check_ends,
    operators_unseen,
    ram_tensor,
    wrong_side,
)
from lohan.device.vendors import KINDS, vendor_of
from lohan.errors import DoesNotFit, HardwareError
from lohan.units import format_bytes
from lohan.vocabulary import Lane


def why_absent(kind: str | None = None) -> str | None:
    """Return why no accelerator (of this kind) can be used, or None if one can."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return f"torch {torch.__version__} is built without GPU support"
    if kind is not None and kind != found.type:
        return f"torch {torch.__version__} is built for {found.type}"
    if not torch.accelerator.is_available():
        return "torch finds no GPU or no driver for it"
    return None


def names() -> tuple[str, ...]:
    """Kinds of accelerator users may name."""
    found = torch.accelerator.current_accelerator()
    return KINDS if found is None or found.type in KINDS else (*KINDS, found.type)


class StreamEvent:
    """A point in a stream."""

    __slots__ = ("event",)

    def __init__(self, event: Any, stream: Any) -> None:
        self.event = event
        self.event.record(stream)

    def is_done(self) -> bool:
        """Whether the stream has come past, well or badly."""
        try:
            return bool(self.event.query())
        except RuntimeError:
            return True  # ended badly; `wait` tells


@dataclass(slots=True)
class _Ends:
    done: StreamEvent
    on_device: Any
    in_ram: Any


class CopyEnds:
    """Ends of copies under way, per lane in order. Runs on: any thread.

    The allocator must not hand their memory out again before the copy is done, and it does not see
    what other streams do.
    """

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self._in_flight: dict[Lane, deque[_Ends]] = {lane: deque() for lane in lanes}
        self._lock = threading.Lock()

    def add(self, lane: Lane, done: StreamEvent, *, on_device: Any, in_ram: Any) -> None:
        """A copy was queued."""
        with self._lock:
            self._in_flight[lane].append(_Ends(done, on_device, in_ram))

    def let_go(self) -> None:
        """Drop those of copies that are done."""
        with self._lock:
            for ends in self._in_flight.values():
                while ends and ends[0].done.is_done():
                    ends.popleft()

    def hand_to_compute(self, event: StreamEvent) -> None:
        """Compute waits for a copy: its end on the device is in the order of compute again."""
        with self._lock:
            for ends in self._in_flight.values():
                if any(one.done is event for one in ends):
                    # A lane keeps its order: those before it are done when it is.
                    for one in ends:
                        one.on_device = None
                        if one.done is event:
                            break

    def clear(self) -> None:
        """Drop all: no copy is under way."""
        with self._lock:
            for ends in self._in_flight.values():
                ends.clear()


class AcceleratorDevice(Device):
    """One accelerator."""

    shares_ram = False

    def __init__(
        self,
        kind: str | None = None,
        index: int | None = None,
        *,
        memory_bytes: int | None = None,
        reason: str = "asked for",
    ) -> None:
        """Open one; None is the kind and number torch would use. `memory_bytes` None: what is free
        but for the vendor's reserve.

        Raises:
            HardwareError: if there is no such accelerator.
            DoesNotFit: if it is smaller than the budget.
        """
        absence = why_absent(kind)
        if absence is None and index is not None and index >= torch.accelerator.device_count():
            absence = f"GPUs are counted from 0 and there are {torch.accelerator.device_count()}"
        if absence is not None:
            raise HardwareError(
                f"there is no GPU {0 if index is None else index}",
                why=absence,
                remedy='install torch with GPU support and a driver, or use device "cpu"',
            )
        index = torch.accelerator.current_device_index() if index is None else index
        found = torch.accelerator.current_accelerator()
        assert found is not None
        self.torch_device = torch.device(found.type, index)
        super().__init__(str(self.torch_device), reason)
        self._index, self._vendor = index, vendor_of(found.type)
        self._module: Any = torch.get_device_module(found)
        self._vendor.set_allocator()
        free_bytes, total_bytes = torch.accelerator.get_memory_info(index)
        # What torch already holds of the GPU is ours to use as well.
        usable_bytes = free_bytes + torch.accelerator.memory_reserved(index)
        usable_bytes = max(1, usable_bytes - self._vendor.reserve_bytes)
        budget_bytes = usable_bytes if memory_bytes is None else memory_bytes
        if budget_bytes > total_bytes:
            raise DoesNotFit(
                f"the gpu budget is {format_bytes(budget_bytes)}, {self.name} has "
                f"{format_bytes(total_bytes)}",
                why="the plan would count on memory that is not there",
                remedy="lower the gpu budget, or leave it out to use what is free",
            )
        self.memory_bytes: int | None = budget_bytes
        fraction = getattr(self._module, "get_per_process_memory_fraction", lambda _: 1.0)
        self._fraction_before = fraction(index)
        self._limit(budget_bytes / total_bytes)
        # The vendor's own classes where there are any: those all have in common ignore settings.
        self._make_event = getattr(self._module, "Event", torch.Event)
        make_stream = getattr(self._module, "Stream", torch.Stream)
        self._compute_stream = _default_stream(self._module, index)
        self._memory_stream = make_stream(device=self.torch_device)  # see "Memory of no queue"
        self._copy_streams = {
            lane: make_stream(device=self.torch_device)
            for lane in (Lane.GPU_TO_RAM, Lane.RAM_TO_GPU)
        }
        self._ends = CopyEnds(self._copy_streams)
        # Two threads on one lane must not mix their waits and copies. One lock per lane: a copy
        # from or to memory that is not pinned blocks, and must not hold up the other direction.
        self._lane_locks = {lane: threading.Lock() for lane in self._copy_streams}
        self._failure: str | None = None
        self.reset_peak()  # of what the process did before, nothing counts but what is alive

    def alloc(self, nbytes: int) -> DeviceMemory:
        """Return memory from torch's allocator; see note "Memory of no queue"."""
        self._check_open()
        self._ends.let_go()
        with self._failing(), self._on(self._memory_stream):
            flat = allocate_flat(nbytes, self.torch_device, self.name)
            born = self._event_on(self._memory_stream)
            for stream in (self._compute_stream, *self._copy_streams.values()):
                stream.wait_event(born.event)
        return DeviceMemory(flat)

    def free(self, memory: DeviceMemory, *, is_idle: bool = False) -> None:
        """Give memory back to torch's allocator; see note "Memory of no queue"."""
        if not is_idle:
            with operators_unseen():
                memory.bytes().record_stream(self._compute_stream)
        memory.invalidate()

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all live tensors, as torch's allocator counts them."""
        self._ends.let_go()
        return int(torch.accelerator.memory_allocated(self._index))

    @property
    def peak_bytes(self) -> int:
        """Most bytes of live tensors at once."""
        return int(torch.accelerator.max_memory_allocated(self._index))

    @property
    def reserved_peak_bytes(self) -> int:
        """Most bytes torch's allocator had of the device at once: live tensors, holes, cache."""
        return int(torch.accelerator.max_memory_reserved(self._index))

    def reset_peak(self) -> None:
        """Measure the peak anew."""
        torch.accelerator.reset_peak_memory_stats(self._index)

    def trim(self) -> None:
        """Give what the allocator caches back to the driver."""
        if self._failure is None:
            with self._failing():
                torch.accelerator.empty_cache()

    def copy_async(
        self, dst: CopyEnd, src: CopyEnd, *, lane: Lane, after: Sequence[Event] = ()
    ) -> Event:
        """Queue a copy on the stream of its lane. Blocks if the RAM end is not pinned."""
        self._check_open()
        check_ends(dst, src, lane)
        is_upward = lane is Lane.RAM_TO_GPU
        dst_bytes = self._gpu_bytes(dst, lane) if is_upward else self._ram_bytes(dst, lane)
        src_bytes = self._ram_bytes(src, lane) if is_upward else self._gpu_bytes(src, lane)
        events = [self._own(event) for event in after]
        self._ends.let_go()
        stream = self._copy_streams[lane]
        with self._failing(), self._lane_locks[lane], self._on(stream), operators_unseen():
            for event in events:
                stream.wait_event(event.event)
            if dst_bytes.numel():
                dst_bytes.copy_(src_bytes, non_blocking=True)
            done = self._event_on(stream)
            ends = ((dst, dst_bytes), (src, src_bytes))
            self._ends.add(lane, done, on_device=ends[not is_upward], in_ram=ends[is_upward])
        return done

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Compute on the default stream, from any thread."""
        self._check_open()
        self._ends.let_go()
        with self._failing(torch.AcceleratorError), self._on(self._compute_stream):
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise DoesNotFit(
                    f"compute needs more than the {format_bytes(self.memory_bytes or 0)} of GPU "
                    f"memory allowed on {self.name}, {format_bytes(self.bytes_in_use)} in use",
                    why=f"torch says: {str(error).splitlines()[0]}",
                    remedy="raise the gpu budget, or use smaller micro-batches or shorter "
                    "sequences",
                ) from error

    @property
    def queue(self) -> "AcceleratorDevice":
        """Itself: the host runs ahead of compute."""
        return self

    def record(self) -> Event:
        """Return the point after all compute queued so far, with its time."""
        with self._failing():
            return self._event_on(self._compute_stream, enable_timing=True)

    def compute_waits(self, event: Event) -> None:
        """Make the default stream wait; the host goes on. See note "Memory of no queue"."""
        own = self._own(event)
        with self._failing():
            self._compute_stream.wait_event(own.event)
        self._ends.hand_to_compute(own)

    def seconds_between(self, first: Event, second: Event) -> float:
        """By the device's own clock."""
        began, ended = self._own(first), self._own(second)
        with self._failing():
            return float(began.event.elapsed_time(ended.event)) / 1000

    def copy_in(self, dst: DeviceMemory, src: CopyEnd) -> None:
        """Queue a copy on the default stream. Blocks if the source is not pinned."""
        lane = Lane.RAM_TO_GPU
        check_ends(dst, src, lane)
        with self._failing(), self._on(self._compute_stream), operators_unseen():
            dst.bytes().copy_(self._ram_bytes(src, lane), non_blocking=True)

    def wait(self, event: Event) -> None:
        """Block the calling thread until the event is done."""
        own = self._own(event)
        with self._failing():
            own.event.synchronize()
        self._ends.let_go()

    def synchronize(self) -> None:
        """Block until all three streams are empty; does nothing once a failure was told."""
        if self._failure is not None:
            return
        with self._failing():
            for stream in (self._compute_stream, *self._copy_streams.values()):
                stream.synchronize()
        self._ends.let_go()

    def rng_state(self) -> torch.Tensor:
        """Return the state of the accelerator's generator."""
        with operators_unseen():
            state: torch.Tensor = self._module.get_rng_state(self.torch_device)
            return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the accelerator's generator."""
        with operators_unseen():
            self._module.set_rng_state(state, self.torch_device)

    def close(self) -> None:
        """Let queued copies end, unpin, and lift the budget."""
        if self._is_closed:
            return
        self._is_closed = True
        # Queued copies cannot be called back. If the device has failed they are gone, and whoever
        # waited for one has been told.
        with contextlib.suppress(HardwareError):
            self.synchronize()
        self._ends.clear()
        self._unpin_all()
        if self._failure is None:
            self._limit(self._fraction_before)

    def _limit(self, fraction: float) -> None:
        """Hold the allocator to a share of the memory, where the vendor's can be."""
        if hasattr(self._module, "set_per_process_memory_fraction"):
            self._module.set_per_process_memory_fraction(fraction, self._index)

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Queue work of this thread on a stream. Unlike `with stream`, re-entry is fine."""
        with torch.accelerator.device_index(self._index):
            before = torch.accelerator.current_stream(self._index)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def _event_on(self, stream: Any, **settings: Any) -> StreamEvent:
        return StreamEvent(self._make_event(**self._vendor.event_settings, **settings), stream)

    @contextlib.contextmanager
    def _failing(self, kind: type[RuntimeError] = RuntimeError) -> Iterator[None]:
        """Tell errors of the runtime as failures of the device; see note "The first failure"."""
        try:
            yield
        except kind as error:
            self._failure = self._failure or str(error).splitlines()[0]
            raise HardwareError(
                f"{self.name} failed",
                why=self._failure,
                remedy="see the driver's log; the process must be started again to use the GPU",
            ) from error

    def _gpu_bytes(self, end: CopyEnd, lane: Lane) -> torch.Tensor:
        if isinstance(end, DeviceMemory):
            return end.bytes()
        if not isinstance(end, torch.Tensor) or end.device != self.torch_device:
            raise wrong_side(lane, "main memory", "device memory")
        with operators_unseen():
            # Dense in some order (checked before), so its bytes are one run from its first one.
            return end.detach().as_strided((end.numel(),), (1,)).view(torch.uint8)

    def _ram_bytes(self, end: CopyEnd, lane: Lane) -> torch.Tensor:
        if isinstance(end, DeviceMemory) or (
            isinstance(end, torch.Tensor) and end.device.type != "cpu"
        ):
            raise wrong_side(lane, "device memory", "main memory")
        return ram_tensor(end)

    def _own(self, event: Event) -> StreamEvent:
        if isinstance(event, StreamEvent):
            return event
        raise foreign_event(event, self.name)

    def _lock_range(self, address: int, nbytes: int) -> None:
        self._vendor.lock_range(self.torch_device, address, nbytes)

    def _unlock_range(self, address: int) -> None:
        # A failed device refuses, and the driver unpins what the process leaves behind.
        if self._failure is None:
            self._vendor.unlock_range(self.torch_device, address)


def _default_stream(module: Any, index: int) -> Any:
    """The stream that work of a thread goes to which was told nothing."""
    if hasattr(module, "default_stream"):
        return module.default_stream(index)
    found: list[Any] = []
    asked = threading.Thread(target=lambda: found.append(torch.accelerator.current_stream(index)))
    asked.start()
    asked.join()
    return found[0]
