import gc
import threading
import weakref

import pytest
import torch

from lohan.device import EmulatedDevice, EmulatedRates
from lohan.errors import ConfigError, HardwareError
from lohan.vocabulary import Lane
from support.clocks import ManualClock
from support.emulated_rates import RATES

UP, DOWN = Lane.RAM_TO_GPU, Lane.GPU_TO_RAM


def test_both_lanes_run_at_the_same_time(device: EmulatedDevice, clock: ManualClock) -> None:
    slots, ram = [device.alloc(1000) for _ in range(2)], [torch.zeros(250) for _ in range(2)]
    down = device.copy_async(ram[0], slots[0], lane=DOWN)
    up = device.copy_async(slots[1], ram[1], lane=UP)
    clock.await_sleepers([1.0, 2.0])
    clock.advance_to(1.0)
    device.wait(up)
    assert not down.is_done()
    clock.advance_to(2.0)
    device.wait(down)


def test_copies_of_one_lane_queue_up(device: EmulatedDevice, clock: ManualClock) -> None:
    slots = [device.alloc(1000) for _ in range(3)]
    events = [device.copy_async(slot, torch.zeros(250), lane=UP) for slot in slots]
    for number, event in enumerate(events):
        clock.await_sleepers([number + 1.0])
        assert [other.is_done() for other in events] == [i < number for i in range(3)]
        clock.advance_to(number + 1.0)
        device.wait(event)


def test_a_late_wake_up_does_not_make_later_copies_late(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    events = [device.copy_async(device.alloc(1000), torch.zeros(250), lane=UP) for _ in range(2)]
    clock.await_sleepers([1.0])
    clock.advance_to(1.75)
    device.wait(events[0])
    clock.await_sleepers([2.0])


def test_large_copies_trickle_in_chunk_by_chunk(clock: ManualClock) -> None:
    rates = EmulatedRates(ram_to_gpu_bytes_per_second=2.0**20)  # the chunk is 64 KiB then
    with EmulatedDevice(rates=rates, clock=clock) as device:
        slot = device.alloc(2**18)
        event = device.copy_async(slot, torch.zeros(2**18, dtype=torch.uint8), lane=UP)
        clock.await_sleepers([1 / 16])
        clock.advance_to(1 / 16)
        clock.await_sleepers([2 / 16])
        assert slot.bytes()[: 2**16].eq(0).all()
        assert slot.bytes()[2**16 :].eq(255).all()
        clock.advance_to(1.0)
        device.wait(event)
        assert slot.bytes().eq(0).all()


def test_a_copy_starts_after_the_compute_it_comes_after(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    with device.compute():
        device.charge(num_flops=300.0)
    event = device.copy_async(
        device.alloc(1000), torch.zeros(250), lane=UP, after=[device.record()]
    )
    clock.await_sleepers([3.0])
    clock.advance_to(3.0)
    clock.await_sleepers([4.0])
    clock.advance_to(4.0)
    device.wait(event)


def test_compute_takes_the_charged_time_and_the_host_goes_on(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    with device.compute():
        device.charge(num_flops=50.0)
    first = device.record()
    with device.compute():
        device.charge(num_flops=50.0, num_bytes=20.0)  # memory bound: 2 s, not 0.5 s
    second = device.record()
    assert (first.is_done(), second.is_done()) == (False, False)
    clock.advance_to(0.5)
    assert (first.is_done(), second.is_done()) == (True, False)
    clock.advance_to(2.5)
    assert second.is_done()


def test_compute_slower_than_its_charge_takes_the_time_it_took(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    with device.compute():
        clock.advance_to(5.0)
        device.charge(num_flops=100.0)
    assert device.record().is_done()
    with device.compute():
        device.charge(num_flops=100.0)
    clock.advance_to(5.9)
    assert not device.record().is_done()
    clock.advance_to(6.0)
    assert device.record().is_done()


def test_compute_that_waits_for_a_copy_is_charged_from_when_it_came(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    event = device.copy_async(device.alloc(1000), torch.zeros(250), lane=UP)
    clock.await_sleepers([1.0])
    clock.advance_to(1.0)
    device.wait(event)
    with device.compute():
        device.charge(num_flops=50.0)  # from 1.0 to 1.5
        device.compute_waits(event)  # came long ago
        device.charge(num_flops=50.0)
    clock.advance_to(1.999)
    assert not device.record().is_done()
    clock.advance_to(2.0)
    assert device.record().is_done()


def test_idle_time_is_not_made_up(device: EmulatedDevice, clock: ManualClock) -> None:
    with device.compute():
        device.charge(num_flops=100.0)
    clock.advance_to(10.0)
    with device.compute():
        device.charge(num_flops=100.0)
    assert not device.record().is_done()
    clock.advance_to(11.0)
    assert device.record().is_done()


def test_synchronize_waits_for_lanes_and_compute(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    event = device.copy_async(device.alloc(1000), torch.zeros(250), lane=UP)
    with device.compute():
        device.charge(num_flops=200.0)
    done = device.record()
    host = threading.Thread(target=device.synchronize)
    host.start()
    clock.await_sleepers([1.0])
    clock.advance_to(1.0)
    clock.await_sleepers([2.0])
    clock.advance_to(2.0)
    host.join()
    assert event.is_done()
    assert done.is_done()


def test_freeing_the_destination_too_early_fails_at_the_wait(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    slot, ram = device.alloc(1000), torch.zeros(250)
    event = device.copy_async(slot, ram, lane=UP)
    following = device.copy_async(ram, device.alloc(1000), lane=DOWN, after=[event])
    device.free(slot)
    clock.advance_to(1.0)
    with pytest.raises(
        HardwareError, match=r"1000 B on ram_to_gpu failed: device memory was freed"
    ):
        device.wait(event)
    with pytest.raises(HardwareError, match="freed while a copy into it"):
        device.compute_waits(event)
    with pytest.raises(HardwareError, match=r"on gpu_to_ram failed: a copy of .* was freed"):
        device.wait(following)
    with pytest.raises(HardwareError, match="ram_to_gpu failed"):
        device.synchronize()
    # The lane itself goes on.
    later = device.copy_async(device.alloc(1000), ram, lane=UP)
    clock.advance_to(9.0)
    device.wait(later)


def test_any_error_on_a_lane_surfaces_at_the_wait() -> None:
    class BrokenClock(ManualClock):
        def sleep_until(self, deadline_seconds: float, stop: threading.Event) -> None:
            raise OSError("the clock stopped")

    with EmulatedDevice(rates=RATES, clock=BrokenClock()) as device:
        event = device.copy_async(device.alloc(1000), torch.zeros(250), lane=UP)
        with pytest.raises(HardwareError, match="the clock stopped") as caught:
            device.wait(event)
        assert isinstance(caught.value.__cause__, OSError)


def test_close_abandons_what_is_queued_and_lets_waiters_go(clock: ManualClock) -> None:
    device = EmulatedDevice(rates=RATES, clock=clock)
    num_threads = threading.active_count()
    first = device.copy_async(device.alloc(1000), torch.zeros(250), lane=UP)
    second = device.copy_async(torch.zeros(250), device.alloc(1000), lane=DOWN, after=[first])
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            device.wait(second)
        except HardwareError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    clock.await_sleepers([1.0])
    device.close()
    waiter.join()
    assert threading.active_count() == num_threads - 2
    assert "closed" in str(caught[0])
    with pytest.raises(HardwareError, match="closed"):
        device.wait(first)
    device.close()


def test_a_copy_keeps_its_tensors_alive_until_it_is_done_and_no_longer(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    slot, ram = device.alloc(1000), torch.ones(250)
    died = threading.Event()
    weakref.finalize(ram.untyped_storage(), died.set)
    event = device.copy_async(slot, ram, lane=UP)
    del ram
    gc.collect()
    assert not died.is_set()
    clock.advance_to(1.0)
    device.wait(event)
    assert died.wait(200)
    assert slot.tensor(torch.float32, (250,)).tolist() == [1.0] * 250


def test_a_failed_copy_does_not_keep_its_tensors_alive(
    device: EmulatedDevice, clock: ManualClock
) -> None:
    slot, ram = device.alloc(1000), torch.ones(250)
    died = threading.Event()
    weakref.finalize(ram.untyped_storage(), died.set)
    event = device.copy_async(slot, ram, lane=UP)
    del ram
    device.free(slot)
    clock.advance_to(1.0)
    with pytest.raises(HardwareError):
        device.wait(event)
    assert died.wait(200)


def test_a_view_of_device_memory_on_the_ram_side_is_refused(device: EmulatedDevice) -> None:
    first, second = device.alloc(64), device.alloc(64)
    with pytest.raises(HardwareError, match="where main memory belongs"):
        device.copy_async(second, first.tensor(torch.float32, (16,)), lane=UP)


def test_memory_of_another_device_is_refused(device: EmulatedDevice) -> None:
    with EmulatedDevice() as other, pytest.raises(HardwareError, match="not allocated by this"):
        device.free(other.alloc(8))


def test_events_of_another_kind_of_device_are_refused(device: EmulatedDevice) -> None:
    class Foreign:
        def is_done(self) -> bool:
            return True

    for use in (device.wait, device.compute_waits):
        with pytest.raises(HardwareError, match="Foreign"):
            use(Foreign())


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_that_mean_nothing_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="flops_per_second"):
        EmulatedRates(flops_per_second=rate)


def test_real_time_works_too() -> None:
    rates = EmulatedRates(ram_to_gpu_bytes_per_second=1e9, flops_per_second=1e12)
    with EmulatedDevice(rates=rates) as device:
        with device.compute():
            device.charge(num_flops=1e9)
        slot = device.alloc(2**20)
        ram = torch.ones(2**18)
        event = device.copy_async(slot, ram, lane=UP, after=[device.record()])
        device.wait(device.record())
        device.compute_waits(event)
        assert torch.equal(slot.tensor(torch.float32, (2**18,)), ram)
        device.synchronize()
