"""A stand-in for torch's CUDA runtime, so that the GPU device's own logic runs without a GPU.

Work happens at once, on CPU tensors; what is kept is a log of which stream waited for, copied and
recorded what. Every call is checked against the signature of the real function.
"""

import contextlib
import inspect
import weakref
from typing import Any

import pytest
import torch

from lohan.device import cuda, memory

TOTAL_BYTES = 64 * 2**20


class FakeStream:
    def __init__(self, gpu: "FakeGpu", name: str) -> None:
        self.gpu, self.name = gpu, name

    def wait_event(self, event: "FakeEvent") -> None:
        assert event.is_recorded
        self.gpu.log.append(f"{self.name} waits for {event.title}")

    def synchronize(self) -> None:
        self.gpu.fail_if_broken()
        self.gpu.log.append(f"host waits for {self.name}")


class FakeEvent:
    def __init__(self, gpu: "FakeGpu") -> None:
        self.gpu, self.title, self.is_recorded = gpu, "?", False

    def record(self, stream: FakeStream) -> None:
        self.is_recorded = True
        self.gpu.num_events += 1
        self.title = f"event {self.gpu.num_events} of {stream.name}"
        self.gpu.log.append(f"{stream.name} records {self.title}")

    def query(self) -> bool:
        self.gpu.fail_if_broken()
        return self.gpu.is_fast

    def synchronize(self) -> None:
        self.gpu.fail_if_broken()
        self.gpu.log.append(f"host waits for {self.title}")


class FakeGpu:
    """State of the stand-in; tests set `is_fast`, `is_broken` and `register_error`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_events = 0
        self.is_fast, self.is_broken = True, False
        self.register_error = 0
        self.fraction = 1.0
        self.allocated_bytes = self.peak_bytes = 0
        self.registered: dict[int, int] = {}
        self.default = FakeStream(self, "compute")
        self.num_streams = 0

    def fail_if_broken(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    def stream_of(self, device: int) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self, "gpu_to_ram" if self.num_streams % 2 else "ram_to_gpu")

    @contextlib.contextmanager
    def entered(self, *_: object) -> Any:
        yield

    def allocate_flat(self, nbytes: int, device: torch.device, name: str) -> torch.Tensor:
        if self.allocated_bytes + nbytes > self.fraction * TOTAL_BYTES:
            nbytes = 2**62  # the allocator refuses
        flat = memory.allocate_flat(nbytes, device, name)
        self.allocated_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        weakref.finalize(flat, self._returned, nbytes)
        return flat

    def _returned(self, nbytes: int) -> None:
        self.allocated_bytes -= nbytes

    def reset_peak(self, _: object) -> None:
        self.peak_bytes = self.allocated_bytes

    def set_fraction(self, fraction: float, _: object) -> None:
        self.fraction = fraction

    # The runtime library.

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.register_error:
            self.registered[address] = nbytes
        return self.register_error

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 713

    def cudaGetErrorString(self, error: int) -> str:
        return "out of memory" if error == 2 else "not registered"


def install(patch: pytest.MonkeyPatch) -> FakeGpu:
    """Replace what the GPU device uses of torch.cuda, for the length of a test."""
    gpu = FakeGpu()
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (TOTAL_BYTES, TOTAL_BYTES),
        "memory_reserved": lambda device: 0,
        "set_per_process_memory_fraction": gpu.set_fraction,
        "default_stream": lambda device: gpu.default,
        "stream": gpu.entered,
        "memory_allocated": lambda device: gpu.allocated_bytes,
        "max_memory_allocated": lambda device: gpu.peak_bytes,
        "reset_peak_memory_stats": gpu.reset_peak,
        "get_rng_state": lambda device: torch.get_rng_state(),
        "set_rng_state": lambda state, device: torch.set_rng_state(state),
        "cudart": lambda: gpu,
    }
    for name, fake in fakes.items():
        signature = inspect.signature(getattr(torch.cuda, name))

        def checked(
            *args: Any, _signature: Any = signature, _fake: Any = fake, **kwargs: Any
        ) -> Any:
            _signature.bind(*args, **kwargs)
            return _fake(*args, **kwargs)

        patch.setattr(torch.cuda, name, checked)
    patch.setattr(torch.cuda, "device", gpu.entered)
    patch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: gpu.stream_of(device))
    patch.setattr(torch.cuda, "Event", lambda enable_timing=False, blocking=False: FakeEvent(gpu))
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(cuda, "_torch_device", lambda index: torch.device("cpu"))
    patch.setattr(cuda, "allocate_flat", gpu.allocate_flat)
    return gpu
