"""Memory that must not be read holds NaN: before it is written, before a wait, after its end."""

import pytest
import torch

from lohan.device import EmulatedDevice
from lohan.vocabulary import Lane
from support.clocks import ManualClock
from support.emulated_rates import RATES

UP, DOWN = Lane.RAM_TO_GPU, Lane.GPU_TO_RAM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_memory_never_written_reads_as_nan(device: EmulatedDevice, dtype: torch.dtype) -> None:
    assert device.alloc(64).tensor(dtype, (8,)).isnan().all()


def test_reading_before_the_wait_gives_nan(device: EmulatedDevice, clock: ManualClock) -> None:
    slot, ram = device.alloc(1000), torch.ones(250)
    with device.compute():
        slot.bytes().zero_()
    event = device.copy_async(slot, ram, lane=UP)
    view = slot.tensor(torch.float32, (250,))
    assert view.isnan().all()
    clock.await_sleepers([1.0])
    clock.advance_to(0.999)
    assert view.isnan().all()
    assert not event.is_done()
    clock.advance_to(1.0)
    device.wait(event)
    assert torch.equal(view, ram)


def test_reading_the_ram_end_before_the_wait_gives_nan(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    slot, ram = device.alloc(1000), torch.ones(250)
    with device.compute():
        slot.tensor(torch.float32, (250,)).fill_(2.0)
    event = device.copy_async(ram, slot, lane=DOWN, after=[device.record()])
    assert ram.isnan().all()
    clock.advance_to(2.0)
    device.wait(event)
    assert ram.tolist() == [2.0] * 250


def test_freeing_the_source_too_early_copies_nan(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    slot, ram = device.alloc(1000), torch.ones(250)
    with device.compute():
        slot.bytes().zero_()
    event = device.copy_async(ram, slot, lane=DOWN)
    device.free(slot)
    clock.advance_to(2.0)
    device.wait(event)
    assert ram.isnan().all()


def test_changing_the_source_too_early_changes_what_arrives(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    slot, ram = device.alloc(1000), torch.ones(250)
    event = device.copy_async(slot, ram, lane=UP)
    ram.fill_(7.0)
    clock.advance_to(1.0)
    device.wait(event)
    assert slot.tensor(torch.float32, (250,)).tolist() == [7.0] * 250


def test_views_of_freed_memory_read_as_nan(device: EmulatedDevice) -> None:
    slot = device.alloc(16)
    view = slot.tensor(torch.float32, (4,))
    view.fill_(1.0)
    device.free(slot)
    assert view.isnan().all()


def test_memory_left_at_close_is_poisoned_and_given_back() -> None:
    device = EmulatedDevice()
    view = device.alloc(16).tensor(torch.float32, (4,)).fill_(1.0)
    device.close()
    assert view.isnan().all()
    assert device.bytes_in_use == 0


def test_without_poison_nothing_is_filled(clock: ManualClock) -> None:
    with EmulatedDevice(rates=RATES, clock=clock, poisons=False) as device:
        slot = device.alloc(16)
        view = slot.tensor(torch.float32, (4,)).fill_(1.0)
        device.copy_async(slot, torch.zeros(4), lane=UP)
        assert view.tolist() == [1.0] * 4
        device.free(slot)
        assert view.tolist() == [1.0] * 4


def test_a_destination_that_an_earlier_copy_still_reads_is_not_poisoned_yet(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    """The slot goes out and the next block comes in behind it, with no wait of the host."""
    slot, out, into = device.alloc(1000), torch.zeros(250), torch.full((250,), 3.0)
    slot.tensor(torch.float32, (250,)).fill_(2.0)
    leaving = device.copy_async(out, slot, lane=DOWN)
    coming = device.copy_async(slot, into, lane=UP, after=[leaving])
    clock.await_sleepers([2.0])
    assert slot.tensor(torch.float32, (250,)).tolist() == [2.0] * 250
    clock.advance_to(2.0)
    device.wait(leaving)
    clock.await_sleepers([3.0])
    assert out.tolist() == [2.0] * 250
    assert slot.tensor(torch.float32, (250,)).isnan().all()
    clock.advance_to(3.0)
    device.wait(coming)
    assert slot.tensor(torch.float32, (250,)).tolist() == [3.0] * 250
