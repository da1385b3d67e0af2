"""What every device promises (lohan/device/device.py), checked on each of them.

The accelerator runs for real where there is a GPU, and as the test accelerator in a process of its
own (tests/test_accelerator.py).
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from lohan.device import CpuDevice, Device, EmulatedDevice, EmulatedRates
from lohan.device.accelerator import AcceleratorDevice, why_absent
from lohan.errors import DoesNotFit, HardwareError
from lohan.vocabulary import Lane

UP, DOWN = Lane.RAM_TO_GPU, Lane.GPU_TO_RAM
KINDS = ["cpu", "emulated", "emulated_at_a_rate", "accelerator"]
SIZES = [0, 1, 2, 3, 7, 63, 64, 65, 511, 4096, 4097, 2**20 + 1, 3 * 2**20]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Main memory known by its address."""

    address: int
    nbytes: int


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Device]]:
    kind = request.param
    if kind == "accelerator" and why_absent() is not None:
        pytest.skip(f"no GPU: {why_absent()}")
    fast = EmulatedRates(gpu_to_ram_bytes_per_second=2e9, ram_to_gpu_bytes_per_second=1e9)
    makers: dict[str, Callable[..., Device]] = {
        "cpu": CpuDevice,
        "emulated": EmulatedDevice,
        "emulated_at_a_rate": lambda **given: EmulatedDevice(rates=fast, **given),
        "accelerator": AcceleratorDevice,
    }
    made: list[Device] = []

    def open_one(memory_bytes: int | None = None) -> Device:
        made.append(makers[kind](memory_bytes=memory_bytes))
        return made[-1]

    num_threads = threading.active_count()
    yield open_one
    for device in made:
        device.close()
        device.close()
    assert threading.active_count() == num_threads


@pytest.fixture
def device(make: Callable[..., Device]) -> Device:
    return make()


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_come_back_as_they_went(device: Device, nbytes: int) -> None:
    source, back = random_bytes(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    slot = device.alloc(nbytes)
    up = device.copy_async(slot, source, lane=UP)
    device.wait(device.copy_async(back, slot, lane=DOWN, after=[up]))
    assert up.is_done()
    assert torch.equal(back, source)
    device.free(slot)


@pytest.mark.parametrize("start", [0, 1, 2, 3, 5, 64])
def test_main_memory_at_any_address_takes_part(device: Device, start: int) -> None:
    raw = ctypes.create_string_buffer(bytes(range(200)), 200)
    slot = device.alloc(100)
    buffer = Buffer(address=ctypes.addressof(raw) + start, nbytes=100)
    device.wait(device.copy_async(slot, buffer, lane=UP))
    back = ctypes.create_string_buffer(100)
    end = Buffer(address=ctypes.addressof(back), nbytes=100)
    device.wait(device.copy_async(end, slot, lane=DOWN))
    assert back.raw == bytes(range(start, start + 100))


def test_typed_views_share_the_bytes(device: Device) -> None:
    slot = device.alloc(64)
    floats = slot.tensor(torch.float32, (2, 4), offset_bytes=32)
    halves = slot.tensor(torch.bfloat16, (3,), offset_bytes=2)
    with device.compute():
        slot.bytes().zero_()
        floats.fill_(1.5)
        halves.fill_(-2.0)
    back = torch.empty(64, dtype=torch.uint8)
    device.wait(device.copy_async(back, slot, lane=DOWN, after=[device.record()]))
    assert back[32:].view(torch.float32).tolist() == [1.5] * 8
    assert back[:8].view(torch.bfloat16).tolist() == [0.0, -2.0, -2.0, -2.0]
    assert slot.tensor(torch.float32, ()).shape == ()
    assert slot.tensor(torch.int64, (0, 3), offset_bytes=64).numel() == 0


@pytest.mark.parametrize(
    ("shape", "offset_bytes"), [((17,), 0), ((16,), 4), ((1,), 64), ((1,), -4), ((-1,), 0)]
)
def test_view_past_the_end_is_refused(
    device: Device, shape: tuple[int, ...], offset_bytes: int
) -> None:
    with pytest.raises(HardwareError, match="device memory that has 64"):
        device.alloc(64).tensor(torch.float32, shape, offset_bytes=offset_bytes)


def test_misaligned_view_is_refused(device: Device) -> None:
    with pytest.raises(HardwareError, match="multiples of 4"):
        device.alloc(64).tensor(torch.float32, (1,), offset_bytes=2)


def test_copy_of_a_tensor_that_is_dense_but_transposed_keeps_its_bytes(device: Device) -> None:
    slot = device.alloc(24)
    with device.compute():
        matrix = slot.tensor(torch.float32, (2, 3))
        matrix.copy_(torch.arange(6.0).view(2, 3).to(device.torch_device))
    back = torch.empty_strided((3, 2), (1, 3))
    device.wait(device.copy_async(back, matrix.t(), lane=DOWN, after=[device.record()]))
    assert back.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_tensor_with_holes_is_refused(device: Device) -> None:
    slot = device.alloc(64)
    with pytest.raises(HardwareError, match="holes or overlap"):
        device.copy_async(slot, torch.zeros(16, 2)[:, 0], lane=UP)
    with pytest.raises(HardwareError, match="holes or overlap"):
        device.copy_async(slot, torch.zeros(1).expand(16), lane=UP)


def test_ends_of_different_size_are_refused(device: Device) -> None:
    with pytest.raises(HardwareError, match="from 7 to 8 bytes"):
        device.copy_async(device.alloc(8), torch.zeros(7, dtype=torch.uint8), lane=UP)


def test_ends_on_the_wrong_side_are_refused(device: Device) -> None:
    slot, ram = device.alloc(8), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(HardwareError, match="where main memory belongs"):
        device.copy_async(ram, slot, lane=UP)
    with pytest.raises(HardwareError, match="where main memory belongs"):
        device.copy_async(slot, ram, lane=DOWN)
    with pytest.raises(HardwareError, match="carries no copies"):
        device.copy_async(slot, ram, lane=Lane.SSD_READ)


def test_freed_memory_is_refused(device: Device) -> None:
    slot = device.alloc(8)
    device.free(slot)
    assert slot.is_free
    for use in (
        lambda: device.free(slot),
        lambda: slot.tensor(torch.uint8, (8,)),
        lambda: device.copy_async(slot, torch.zeros(8, dtype=torch.uint8), lane=UP),
    ):
        with pytest.raises(HardwareError, match="after they were freed"):
            use()


def test_copies_of_one_lane_run_in_order(device: Device) -> None:
    slot = device.alloc(4096)
    sources = [random_bytes(4096, seed) for seed in range(8)]
    events = [device.copy_async(slot, source, lane=UP) for source in sources]
    device.wait(events[-1])
    assert all(event.is_done() for event in events)
    back = torch.empty(4096, dtype=torch.uint8)
    device.wait(device.copy_async(back, slot, lane=DOWN))
    assert torch.equal(back, sources[-1])


def test_a_chain_over_both_lanes_and_compute_keeps_its_order(device: Device) -> None:
    """Round trips through two slots, with compute in between and no wait of the host."""
    ram = [torch.full((1024,), 1.0) for _ in range(6)]
    slots = [device.alloc(4096) for _ in range(2)]
    is_free = [device.record(), device.record()]
    for step, buffer in enumerate(ram):
        slot = slots[step % 2]
        arrived = device.copy_async(slot, buffer, lane=UP, after=[is_free[step % 2]])
        with device.compute():
            device.compute_waits(arrived)
            slot.tensor(torch.float32, (1024,)).add_(step)
        computed = device.record()
        is_free[step % 2] = device.copy_async(buffer, slot, lane=DOWN, after=[computed])
    device.synchronize()
    for step, buffer in enumerate(ram):
        assert buffer.tolist() == [1.0 + step] * 1024


def test_many_threads_may_copy_at_once(device: Device) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for round_number in range(10):
                source = random_bytes(10_000, seed * 100 + round_number)
                back = torch.empty_like(source)
                slot = device.alloc(10_000)
                up = device.copy_async(slot, source, lane=UP)
                device.wait(device.copy_async(back, slot, lane=DOWN, after=[up]))
                device.free(slot)
                assert torch.equal(back, source)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_memory_in_use_and_peak_are_counted(make: Callable[..., Device]) -> None:
    device = make()
    before = device.bytes_in_use
    device.reset_peak()
    first, second = device.alloc(2**20), device.alloc(2**21)
    assert device.bytes_in_use == before + 3 * 2**20
    device.free(first)
    assert device.bytes_in_use == before + 2**21
    assert device.peak_bytes == before + 3 * 2**20
    device.reset_peak()
    assert device.peak_bytes == before + 2**21
    device.free(second)
    assert device.bytes_in_use == before


def test_beyond_the_budget_is_refused_and_the_device_goes_on(make: Callable[..., Device]) -> None:
    device = make(memory_bytes=8 * 2**20)
    assert device.memory_bytes == 8 * 2**20
    held = device.alloc(5 * 2**20)
    with pytest.raises(DoesNotFit):
        device.alloc(6 * 2**20)
    device.free(held)
    device.free(device.alloc(6 * 2**20))


@pytest.mark.parametrize("nbytes", [2**50, 2**62, 2**63, 2**70])
def test_absurd_sizes_do_not_fit(device: Device, nbytes: int) -> None:
    before = device.bytes_in_use
    with pytest.raises(DoesNotFit):
        device.alloc(nbytes)
    assert device.bytes_in_use == before


def test_negative_sizes_are_refused(device: Device) -> None:
    with pytest.raises(HardwareError, match="negative"):
        device.alloc(-1)
    assert device.bytes_in_use == 0 or device.torch_device.type != "cpu"


def test_pinning_is_checked(device: Device) -> None:
    raw = ctypes.create_string_buffer(3 * 4096)
    address = ctypes.addressof(raw)
    device.pin(address, 4096)
    with pytest.raises(HardwareError, match="pinned already"):
        device.pin(address + 4000, 4096)
    with pytest.raises(HardwareError, match="nothing is pinned"):
        device.unpin(address + 1)
    device.unpin(address)
    device.pin(address, 4096)  # left for close to undo
    with pytest.raises(HardwareError, match="no memory there"):
        device.pin(address, 0)


def test_pinned_memory_takes_part_in_copies(device: Device) -> None:
    source, back = random_bytes(8192), torch.zeros(8192, dtype=torch.uint8)
    device.pin(source.data_ptr(), 8192)
    slot = device.alloc(8192)
    up = device.copy_async(slot, source, lane=UP)
    device.wait(device.copy_async(back, slot, lane=DOWN, after=[up]))
    device.unpin(source.data_ptr())
    assert torch.equal(back, source)


def test_dropout_repeats_from_a_saved_state(device: Device) -> None:
    with device.compute():
        ones = torch.ones(1000, device=device.torch_device)
        state = device.rng_state()
        first = torch.nn.functional.dropout(ones)
        other = torch.nn.functional.dropout(ones)
        device.set_rng_state(state)
        again = torch.nn.functional.dropout(ones)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_errors_of_the_body_pass_through_compute(device: Device) -> None:
    with pytest.raises(ZeroDivisionError), device.compute():
        raise ZeroDivisionError


def test_what_a_device_does_itself_is_unseen_by_dispatch_modes(device: Device) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    ram = torch.zeros(4096, dtype=torch.uint8)
    transposed = torch.zeros(32, 32).t()
    with device.compute(), Counting():
        slot = device.alloc(4096)
        slot.tensor(torch.float32, (32, 32))
        device.wait(device.copy_async(slot, ram, lane=UP))
        device.wait(device.copy_async(slot, transposed, lane=UP, after=[device.record()]))
        device.wait(device.copy_async(ram, slot, lane=DOWN))
        device.set_rng_state(device.rng_state())
        device.charge(num_flops=1.0)
        device.synchronize()
    assert seen == []


def test_a_closed_device_refuses_work(device: Device) -> None:
    slot = device.alloc(8)
    device.close()
    ram = torch.zeros(8, dtype=torch.uint8)
    for use in (
        lambda: device.alloc(8),
        lambda: device.copy_async(slot, ram, lane=UP),
        lambda: device.pin(ram.data_ptr(), 8),
        lambda: device.compute().__enter__(),
    ):
        with pytest.raises(HardwareError):
            use()


def test_a_device_names_itself_and_closes_with_its_block(make: Callable[..., Device]) -> None:
    with make() as device:
        assert device.name
        assert device.reason
        assert torch.zeros(1, device=device.torch_device).device.type == device.torch_device.type
    with pytest.raises(HardwareError, match="closed"):
        device.alloc(1)
