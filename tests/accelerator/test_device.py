"""The accelerator device's own rules, on the test accelerator: who waits for whom, what fails how.

A queue that is held shows what waits for it and what does not, without a clock.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from lohan.device import open_device, torch_device_named, vendors
from lohan.device.accelerator import AcceleratorDevice
from lohan.device.vendors import vendor_of
from lohan.errors import ConfigError, DoesNotFit, HardwareError
from lohan.vocabulary import Lane
from support import accelerator

UP, DOWN = Lane.RAM_TO_GPU, Lane.GPU_TO_RAM
COMPUTE = 0
MIB = 1 << 20
PATIENCE_SECONDS = 60
"""For what should come at once; reached only by a mistake."""


@pytest.fixture
def device() -> Iterator[AcceleratorDevice]:
    with AcceleratorDevice() as device:
        yield device
        accelerator.reset()


def pinned(device: AcceleratorDevice, value: float, num: int = 1024) -> torch.Tensor:
    ram = torch.full((num,), value)
    device.pin(ram.data_ptr(), ram.nbytes)
    return ram


def comes(work: Callable[[], None]) -> bool:
    """Whether work ends although some queue is held."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    return not thread.is_alive()


def test_a_prefetch_does_not_wait_for_compute(device: AcceleratorDevice) -> None:
    ram = pinned(device, 3.0)
    device.free(device.alloc(4096))  # memory that was in use before
    accelerator.calls().hold(COMPUTE)
    slots = []

    def prefetch() -> None:
        slots.append(device.alloc(4096))
        device.wait(device.copy_async(slots[0], ram, lane=UP))

    assert comes(prefetch), "the copy waits for compute that has nothing to do with it"
    accelerator.calls().let_go(COMPUTE)
    assert slots[0].tensor(torch.float32, (1024,)).cpu().tolist() == [3.0] * 1024


def test_memory_that_queued_compute_reads_is_not_handed_out_again(
    device: AcceleratorDevice,
) -> None:
    ram = pinned(device, 3.0)
    slot = device.alloc(4096)
    device.compute_waits(device.copy_async(slot, ram, lane=UP))
    accelerator.calls().hold(COMPUTE)
    with device.compute():
        doubled = slot.tensor(torch.float32, (1024,)) * 2
    address = slot.address
    device.free(slot)
    other = device.alloc(4096)
    assert other.address != address
    device.wait(device.copy_async(other, pinned(device, 9.0), lane=UP))
    accelerator.calls().let_go(COMPUTE)
    assert doubled.cpu().tolist() == [6.0] * 1024
    torch.accelerator.synchronize()
    assert device.alloc(4096).address == address


def test_idle_memory_is_handed_out_again_while_other_compute_is_queued(
    device: AcceleratorDevice,
) -> None:
    """Two buffers for weights are two: the next block's compute is queued when one is free."""
    first, second = device.alloc(4096), device.alloc(4096)
    with device.compute():
        first.bytes().zero_()
    device.wait(device.record())
    accelerator.calls().hold(COMPUTE)
    with device.compute():
        second.bytes().zero_()
    address = first.address
    device.free(first, is_idle=True)
    assert device.alloc(4096).address == address
    accelerator.calls().let_go(COMPUTE)


def test_the_end_of_memory_under_pressure_waits_for_compute(device: AcceleratorDevice) -> None:
    """Where nothing else is left, an allocation waits for what queued compute still holds."""
    with AcceleratorDevice(memory_bytes=8 * MIB) as small:
        torch.accelerator.empty_cache()
        held = small.alloc(6 * MIB)
        with small.compute():
            held.bytes().zero_()
        small.free(held)
        small.free(small.alloc(6 * MIB))


def test_ends_of_a_copy_live_until_it_is_done(device: AcceleratorDevice) -> None:
    stream = device._copy_streams[DOWN].stream_id
    ram = pinned(device, 0.0)
    with device.compute():
        source = torch.full((1024,), 5.0, device=device.torch_device)
    accelerator.calls().hold(stream)
    done = device.copy_async(ram, source, lane=DOWN, after=[device.record()])
    address = source.data_ptr()
    del source
    with device.compute():
        assert torch.full((1024,), 1.0, device=device.torch_device).data_ptr() != address
    accelerator.calls().let_go(stream)
    device.wait(done)
    assert ram.tolist() == [5.0] * 1024
    assert device.bytes_in_use == 0


def test_the_allocator_is_held_to_the_budget_until_close() -> None:
    total = torch.accelerator.get_memory_info()[1]
    torch.testgpu.set_per_process_memory_fraction(0.75)  # type: ignore[attr-defined]
    with AcceleratorDevice(memory_bytes=MIB) as device:
        assert torch.testgpu.get_per_process_memory_fraction() == MIB / total  # type: ignore[attr-defined]
        torch.accelerator.empty_cache()
        with pytest.raises(DoesNotFit, match=r"more than the 1\.0 MiB"), device.compute():
            torch.empty(2 * MIB, dtype=torch.uint8, device=device.torch_device)
    assert torch.testgpu.get_per_process_memory_fraction() == 0.75  # type: ignore[attr-defined]
    torch.testgpu.set_per_process_memory_fraction(1.0)  # type: ignore[attr-defined]


def test_some_of_what_is_free_is_left_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.accelerator.empty_cache()
    with AcceleratorDevice() as device:
        free_bytes = device.memory_bytes
    assert free_bytes == torch.accelerator.get_memory_info()[1]
    row = replace(vendor_of("xpu"), lock_range=vendor_of(accelerator.NAME).lock_range)
    monkeypatch.setitem(vendors._VENDORS, accelerator.NAME, row)
    with AcceleratorDevice() as device:
        assert device.memory_bytes == free_bytes - 600 * MIB
    with AcceleratorDevice(memory_bytes=free_bytes) as device:
        assert device.memory_bytes == free_bytes, "what was asked for is asked for"


def test_trimming_gives_cached_memory_back(device: AcceleratorDevice) -> None:
    device.free(device.alloc(3 * MIB))
    assert torch.accelerator.memory_reserved() >= 3 * MIB
    device.trim()
    assert torch.accelerator.memory_reserved() < 3 * MIB


def test_the_first_failure_is_told_and_cleaning_up_is_quiet(device: AcceleratorDevice) -> None:
    ram = pinned(device, 1.0)
    slot, event = device.alloc(4096), device.record()
    accelerator.calls().fail("an illegal memory access")
    for _ in range(2):  # whoever comes later is told of the first failure too
        with pytest.raises(HardwareError, match="an illegal memory access") as caught:
            device.wait(device.record())
        assert "\n" not in caught.value.why
    for use in (
        lambda: device.alloc(8),
        lambda: device.copy_async(slot, ram, lane=UP),
        lambda: device.compute_waits(event),
    ):
        with pytest.raises(HardwareError, match="an illegal memory access"):
            use()
    with pytest.raises(HardwareError, match="an illegal memory access"), device.compute():
        torch.zeros(8, device=device.torch_device)
    assert event.is_done()
    device.synchronize()
    device.free(slot)
    device.trim()
    device.unpin(ram.data_ptr())
    device.close()


def test_a_failure_nobody_waited_for_is_told_by_synchronize(device: AcceleratorDevice) -> None:
    accelerator.calls().fail("a bus error")
    with pytest.raises(HardwareError, match="a bus error"):
        device.synchronize()
    device.synchronize()


def test_errors_of_the_model_are_no_failures_of_the_device(device: AcceleratorDevice) -> None:
    with pytest.raises(RuntimeError, match="same device") as caught, device.compute():
        torch.ones(4, device=device.torch_device) + torch.ones(4)
    assert not isinstance(caught.value, torch.AcceleratorError)
    device.wait(device.record())


def test_pinned_memory_is_registered_at_its_exact_size(device: AcceleratorDevice) -> None:
    before = accelerator.calls().pinned_bytes()
    ram = pinned(device, 0.0, 12345)
    pinned(device, 0.0, 7)
    assert accelerator.calls().pinned_bytes() == before + 4 * 12352
    device.unpin(ram.data_ptr())
    assert accelerator.calls().pinned_bytes() == before + 28
    device.close()
    assert accelerator.calls().pinned_bytes() == before


def test_ends_on_another_device_are_refused(device: AcceleratorDevice) -> None:
    elsewhere = torch.zeros(8, dtype=torch.uint8, device="meta")
    ram = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(HardwareError, match="has main memory where device memory belongs"):
        device.copy_async(elsewhere, ram, lane=UP)
    with pytest.raises(HardwareError, match="has device memory where main memory belongs"):
        device.copy_async(elsewhere, device.alloc(8), lane=DOWN)


def test_foreign_events_are_refused(device: AcceleratorDevice) -> None:
    class Foreign:
        def is_done(self) -> bool:
            return True

    with pytest.raises(HardwareError, match="Foreign"):
        device.wait(Foreign())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "testgpu:0"),
        (" TestGPU ", "testgpu:0"),
        ("testgpu:3", "testgpu:3"),
        ("cpu", "cpu"),
        ("emulated", "cpu"),
        ("cuda:1", "cpu"),
        ("no device at all", "cpu"),
    ],
)
def test_where_a_device_computes_is_known_before_it_is_opened(
    text: str | None, expected: str
) -> None:
    assert torch_device_named(text) == torch.device(expected)


def test_it_is_opened_by_name_and_by_default() -> None:
    with open_device() as device:
        assert device.name == f"{accelerator.NAME}:0"
        assert device.reason == "a GPU was found"
    with open_device(f" {accelerator.NAME.upper()}:0 ", memory_bytes=1000) as device:
        assert device.memory_bytes == 1000
    with pytest.raises(HardwareError, match="there are 1"):
        open_device(f"{accelerator.NAME}:1")
    with pytest.raises(HardwareError, match=f"is built for {accelerator.NAME}"):
        open_device("cuda")
    with pytest.raises(DoesNotFit, match=r"budget is 9\.0 GiB, testgpu:0 has 8\.0 GiB"):
        open_device(accelerator.NAME, memory_bytes=9 << 30)
    with pytest.raises(ConfigError, match=f"known are .*{accelerator.NAME}"):
        open_device("testgp")
