"""The GPU device's own logic, on a stand-in for the runtime library; CUDA is named nowhere else."""

import ast
import pathlib
import re

import pytest
import torch

from lohan.device.cuda import CudaDevice
from lohan.errors import DoesNotFit, HardwareError
from lohan.vocabulary import Lane
from support import fake_gpu
from support.fake_gpu import FakeGpu

SOURCE = pathlib.Path(__file__).parents[3] / "src" / "lohan"
UP, DOWN = Lane.RAM_TO_GPU, Lane.GPU_TO_RAM


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return fake_gpu.install(monkeypatch)


def test_a_copy_waits_on_its_own_stream_for_what_it_comes_after(gpu: FakeGpu) -> None:
    device = CudaDevice()
    slot, ram = device.alloc(8), torch.zeros(8, dtype=torch.uint8)
    gpu.log.clear()
    up = device.copy_async(slot, ram, lane=UP, after=[device.record()])
    device.compute_waits(up)
    device.copy_async(ram, slot, lane=DOWN, after=[device.record()])
    assert gpu.log == [
        "compute records event 2 of compute",
        "ram_to_gpu waits for event 2 of compute",
        "ram_to_gpu records event 3 of ram_to_gpu",
        "compute waits for event 3 of ram_to_gpu",
        "compute records event 4 of compute",
        "gpu_to_ram waits for event 4 of compute",
        "gpu_to_ram records event 5 of gpu_to_ram",
    ]


def test_copies_wait_for_compute_that_may_still_use_fresh_memory(gpu: FakeGpu) -> None:
    CudaDevice().alloc(8)
    assert gpu.log == [
        "compute records event 1 of compute",
        "gpu_to_ram waits for event 1 of compute",
        "ram_to_gpu waits for event 1 of compute",
    ]


def test_memory_freed_under_a_copy_is_not_handed_out_before_it_is_done(gpu: FakeGpu) -> None:
    device = CudaDevice()
    gpu.is_fast = False
    slot = device.alloc(1000)
    device.copy_async(slot, torch.zeros(1000, dtype=torch.uint8), lane=UP)
    device.free(slot)
    assert device.bytes_in_use == 1000
    gpu.is_fast = True
    assert device.bytes_in_use == 0


def test_the_allocator_is_held_to_the_budget_until_close(gpu: FakeGpu) -> None:
    device = CudaDevice(memory_bytes=fake_gpu.TOTAL_BYTES // 4)
    assert gpu.fraction == 0.25
    device.close()
    assert gpu.fraction == 1.0


def test_running_out_of_memory_in_compute_does_not_fit(gpu: FakeGpu) -> None:
    device = CudaDevice(memory_bytes=2**20)
    with pytest.raises(DoesNotFit, match=r"more than the 1\.0 MiB"), device.compute():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_memory_is_pinned_at_its_exact_size_and_unpinned_at_close(gpu: FakeGpu) -> None:
    device = CudaDevice()
    ram = torch.zeros(12345, dtype=torch.uint8)
    device.pin(ram.data_ptr(), 12345)
    assert gpu.registered == {ram.data_ptr(): 12345}
    device.close()
    assert gpu.registered == {}


def test_refused_pinning_says_why_and_leaves_nothing_pinned(gpu: FakeGpu) -> None:
    device = CudaDevice()
    ram = torch.zeros(4096, dtype=torch.uint8)
    gpu.register_error = 2
    with pytest.raises(HardwareError, match=r"4\.0 KiB .* out of memory \(error 2\)"):
        device.pin(ram.data_ptr(), 4096)
    gpu.register_error = 0
    device.pin(ram.data_ptr(), 4096)
    gpu.registered.clear()
    with pytest.raises(HardwareError, match="could not be unpinned"):
        device.unpin(ram.data_ptr())
    gpu.registered[ram.data_ptr()] = 4096
    device.close()


def test_a_failed_gpu_surfaces_at_the_wait_and_closes_quietly(gpu: FakeGpu) -> None:
    device = CudaDevice()
    event = device.copy_async(device.alloc(8), torch.zeros(8, dtype=torch.uint8), lane=UP)
    gpu.is_broken = True
    assert event.is_done()
    for use in (lambda: device.wait(event), device.synchronize):
        with pytest.raises(HardwareError, match="illegal memory access"):
            use()
    device.close()


def test_ends_on_another_device_are_refused(gpu: FakeGpu) -> None:
    device = CudaDevice()
    elsewhere = torch.zeros(8, dtype=torch.uint8, device="meta")
    ram = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(HardwareError, match="has main memory where device memory belongs"):
        device.copy_async(elsewhere, ram, lane=UP)
    with pytest.raises(HardwareError, match="has device memory where main memory belongs"):
        device.copy_async(elsewhere, device.alloc(8), lane=DOWN)


def test_foreign_events_are_refused(gpu: FakeGpu) -> None:
    class Foreign:
        def is_done(self) -> bool:
            return True

    with pytest.raises(HardwareError, match="Foreign"):
        CudaDevice().wait(Foreign())


def named_in_code(path: pathlib.Path) -> list[str]:
    """Return identifiers and short strings of a file that name CUDA; prose is free to."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.name for alias in node.names]
            names.append(getattr(node, "module", None) or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names += re.findall(r"^\s*cuda(?::\d+)?\s*$", node.value)
    return [name for name in names if "cuda" in name.lower() or "cudart" in name.lower()]


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_cuda_is_named_in_one_file_only(path: pathlib.Path) -> None:
    # `open.py` knows the word users write and the file to ask, no more.
    allowed = {
        "device/cuda.py": None,
        "device/open.py": {"_CUDA", "cuda", "cuda:0", "CudaDevice"},
    }.get(str(path.relative_to(SOURCE)), set())
    if allowed is not None:
        assert set(named_in_code(path)) <= allowed, "ask the device instead"


def test_native_code_does_not_name_cuda() -> None:
    native = SOURCE.parents[1] / "native"
    for path in native.rglob("*"):
        if path.suffix in (".cpp", ".h", ".hpp", ".cu"):
            assert not re.search(r"#include\s*[<\"]cuda", path.read_text()), path
