"""GPUs through torch's CUDA runtime: streams, events, pinned memory. The only file that names CUDA.

Owns two copy streams beside torch's default stream, which is the compute queue: the default one, so
that work of any thread lands in it without being told. Memory comes from torch's caching allocator,
held to the budget by it. Rules that are not about CUDA live in `memory.py` and `pinned.py`.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch

from lohan.device.device import CopyEnd, Event, RamBuffer
from lohan.device.memory import (
    DeviceMemory,
    allocate_flat,
    check_ends,
    closed_error,
    operators_unseen,
    ram_tensor,
)
from lohan.device.pinned import PinnedRanges
from lohan.errors import DoesNotFit, HardwareError
from lohan.units import format_bytes
from lohan.vocabulary import Lane

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


def why_absent() -> str | None:
    """Return why no GPU can be used, or None if one can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without GPU support"
    if not torch.cuda.is_available():
        return "torch finds no GPU or no driver for it"
    return None


def _torch_device(index: int) -> torch.device:
    return torch.device("cuda", index)


class _CudaEvent:
    """A point in a stream."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a waiting thread sleeps instead of taking a core from the optimizer.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def is_done(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError:
            return True  # ended badly; `wait` tells


class CudaDevice:
    """One GPU."""

    shares_ram = False

    def __init__(
        self,
        index: int | None = None,
        *,
        memory_bytes: int | None = None,
        reason: str = "asked for",
    ) -> None:
        """Open a GPU; None is the one torch would use. `memory_bytes` None is what is free.

        Raises:
            HardwareError: if there is no such GPU.
            DoesNotFit: if it is smaller than the budget.
        """
        absence = why_absent()
        if absence is None and index is not None and index >= torch.cuda.device_count():
            absence = f"GPUs are counted from 0 and there are {torch.cuda.device_count()}"
        if absence is not None:
            raise HardwareError(
                f"there is no GPU {0 if index is None else index}",
                why=absence,
                remedy='install torch with GPU support and a driver, or use device "cpu"',
            )
        index = torch.cuda.current_device() if index is None else index
        self.name, self.reason = f"cuda:{index}", reason
        self.torch_device = _torch_device(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        self._index = index
        # What torch already holds of the GPU is ours to use as well.
        usable_bytes = free_bytes + torch.cuda.memory_reserved(index)
        budget_bytes = usable_bytes if memory_bytes is None else memory_bytes
        if budget_bytes > total_bytes:
            raise DoesNotFit(
                f"the gpu budget is {format_bytes(budget_bytes)}, {self.name} has "
                f"{format_bytes(total_bytes)}",
                why="the plan would count on memory that is not there",
                remedy="lower the gpu budget, or leave it out to use what is free",
            )
        self.memory_bytes: int | None = budget_bytes
        torch.cuda.set_per_process_memory_fraction(budget_bytes / total_bytes, index)
        self._compute_stream = torch.cuda.default_stream(index)
        self._copy_streams = {
            Lane.GPU_TO_RAM: torch.cuda.Stream(index),
            Lane.RAM_TO_GPU: torch.cuda.Stream(index),
        }
        # Ends of copies under way, per lane in order: the allocator must not hand their memory
        # out again before the copy is done, and it does not see what other streams do.
        self._ends_in_flight: dict[Lane, deque[tuple[_CudaEvent, Any]]] = {
            lane: deque() for lane in self._copy_streams
        }
        self._ends_lock = threading.Lock()
        # Two threads on one lane must not mix their waits and copies. One lock per lane: a copy
        # from or to memory that is not pinned blocks, and must not hold up the other direction.
        self._lane_locks = {lane: threading.Lock() for lane in self._copy_streams}
        self._pinned = PinnedRanges(self._register, self._unregister)
        self._is_closed = False

    def alloc(self, nbytes: int) -> DeviceMemory:
        """Return memory from torch's allocator."""
        self._check_open()
        self._let_go()
        with torch.cuda.stream(self._compute_stream):
            memory = DeviceMemory(allocate_flat(nbytes, self.torch_device, self.name))
        # The allocator may hand out bytes that queued compute still reads: it orders only its own
        # stream. Copies queued from now on start after that compute.
        born = _CudaEvent(self._compute_stream)
        for stream in self._copy_streams.values():
            stream.wait_event(born.event)
        return memory

    def free(self, memory: DeviceMemory) -> None:
        """Give memory back to torch's allocator."""
        memory.invalidate()

    def adopt(self, ram: torch.Tensor | RamBuffer) -> DeviceMemory:
        """Refuse: a GPU has memory of its own."""
        raise HardwareError(
            f"{self.name} cannot compute from main memory",
            why="it has memory of its own",
            remedy="allocate device memory and copy into it (see shares_ram)",
        )

    @property
    def bytes_in_use(self) -> int:
        """Bytes of all live tensors, as torch's allocator counts them."""
        self._let_go()
        return int(torch.cuda.memory_allocated(self._index))

    @property
    def peak_bytes(self) -> int:
        """Most bytes of live tensors at once."""
        return int(torch.cuda.max_memory_allocated(self._index))

    def reset_peak(self) -> None:
        """Measure the peak anew."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def pin(self, address: int, nbytes: int) -> None:
        """Lock main memory in place, exactly these bytes: no rounding to powers of two."""
        self._check_open()
        self._pinned.pin(address, nbytes)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        self._pinned.unpin(address)

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
        self._let_go()
        stream = self._copy_streams[lane]
        with self._lane_locks[lane], torch.cuda.stream(stream), operators_unseen():
            for event in events:
                stream.wait_event(event.event)
            if dst_bytes.numel():
                dst_bytes.copy_(src_bytes, non_blocking=True)
            done = _CudaEvent(stream)
            with self._ends_lock:
                self._ends_in_flight[lane].append((done, (dst, src, dst_bytes, src_bytes)))
        return done

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Compute on the default stream, from any thread."""
        self._check_open()
        self._let_go()
        with torch.cuda.device(self._index), torch.cuda.stream(self._compute_stream):
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

    def charge(
        self, *, num_flops: float = 0.0, num_bytes: float = 0.0, fixed_seconds: float = 0.0
    ) -> None:
        """Do nothing: this device has a speed of its own."""

    def record(self) -> Event:
        """Return the point after all compute queued so far."""
        return _CudaEvent(self._compute_stream)

    def compute_waits(self, event: Event) -> None:
        """Make the default stream wait; the host goes on."""
        self._compute_stream.wait_event(self._own(event).event)

    def wait(self, event: Event) -> None:
        """Block the calling thread until the event is done."""
        own = self._own(event)
        try:
            own.event.synchronize()
        except RuntimeError as error:
            self._fail(error)
        self._let_go()

    def synchronize(self) -> None:
        """Block until all three streams are empty."""
        try:
            for stream in (self._compute_stream, *self._copy_streams.values()):
                stream.synchronize()
        except RuntimeError as error:
            self._fail(error)
        self._let_go()

    def rng_state(self) -> torch.Tensor:
        """Return the state of the GPU's generator."""
        with operators_unseen():
            return torch.cuda.get_rng_state(self._index)

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Set the GPU's generator."""
        with operators_unseen():
            torch.cuda.set_rng_state(state, self._index)

    def close(self) -> None:
        """Let queued copies end, unpin, and lift the budget."""
        if self._is_closed:
            return
        self._is_closed = True
        # Queued copies cannot be called back. If the GPU has failed they are gone, and whoever
        # waited for one has been told.
        with contextlib.suppress(HardwareError):
            self.synchronize()
        with self._ends_lock:
            for ends in self._ends_in_flight.values():
                ends.clear()
        self._pinned.unpin_all()
        torch.cuda.set_per_process_memory_fraction(1.0, self._index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error(self.name)

    def _let_go(self) -> None:
        """Drop the ends of copies that are done."""
        with self._ends_lock:
            for ends in self._ends_in_flight.values():
                while ends and ends[0][0].is_done():
                    ends.popleft()

    def _gpu_bytes(self, end: CopyEnd, lane: Lane) -> torch.Tensor:
        if isinstance(end, DeviceMemory):
            return end.bytes()
        if not isinstance(end, torch.Tensor) or end.device != self.torch_device:
            self._refuse_side(lane, "main memory", "device memory")
        with operators_unseen():
            # Dense in some order (checked before), so its bytes are one run from its first one.
            return end.detach().as_strided((end.numel(),), (1,)).view(torch.uint8)

    def _ram_bytes(self, end: CopyEnd, lane: Lane) -> torch.Tensor:
        if isinstance(end, DeviceMemory) or (
            isinstance(end, torch.Tensor) and end.device.type != "cpu"
        ):
            self._refuse_side(lane, "device memory", "main memory")
        return ram_tensor(end)

    def _refuse_side(self, lane: Lane, found: str, expected: str) -> NoReturn:
        raise HardwareError(
            f"a copy on {lane} has {found} where {expected} belongs",
            why="the lane says the other direction, or the tensor is on another device",
            remedy="swap the ends or name the other lane",
        )

    def _own(self, event: Event) -> _CudaEvent:
        if isinstance(event, _CudaEvent):
            return event
        raise HardwareError(
            f"an event of type {type(event).__name__} was given to {self.name}",
            why="only the device that made an event understands it",
            remedy="use events of the same device",
        )

    def _fail(self, error: RuntimeError) -> NoReturn:
        raise HardwareError(
            f"{self.name} failed",
            why=str(error).splitlines()[0],
            remedy="see the driver's log; the process must be started again to use the GPU",
        ) from error

    def _register(self, address: int, nbytes: int) -> None:
        runtime: Any = torch.cuda.cudart()
        result = runtime.cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE)
        if int(result) == 0:
            return
        self._forget_last_error()
        raise HardwareError(
            f"{format_bytes(nbytes)} of main memory could not be pinned",
            why=f"the driver says: {runtime.cudaGetErrorString(result)} (error {int(result)})",
            remedy="raise the locked-memory limit (ulimit -l), or go on unpinned at a lower rate",
        )

    def _unregister(self, address: int) -> None:
        runtime: Any = torch.cuda.cudart()
        result = runtime.cudaHostUnregister(address)
        if int(result) != 0:
            self._forget_last_error()
            raise HardwareError(
                f"memory at {address:#x} could not be unpinned",
                why=f"the driver says: {runtime.cudaGetErrorString(result)} (error {int(result)})",
                remedy="unpin memory before it is freed",
            )

    def _forget_last_error(self) -> None:
        """Clear the error a refused call leaves behind in this thread.

        The runtime hands it to the next kernel launch, which would fail for no reason of its own;
        torch has no call to clear it, so a launch of ours takes it.
        """
        with contextlib.suppress(RuntimeError), operators_unseen():
            torch.zeros(1, dtype=torch.uint8, device=self.torch_device).add_(1)
