"""Copies: an emulated device's set rates come out, and both ways at once is seen."""

import time

import pytest

from lohan.device import CpuDevice, Device, EmulatedDevice, EmulatedRates
from lohan.errors import DoesNotFit, HardwareError
from lohan.measure.copies import measure_copies, measure_ram_copies
from lohan.units import KIB, MIB
from lohan.vocabulary import Lane
from support.ssd_engines import nothing_leaks
from support.timed_engine import HandClock


def test_the_rates_of_an_emulated_device_come_out() -> None:
    clock = HandClock()
    rates = EmulatedRates(ram_to_gpu_bytes_per_second=2e9, gpu_to_ram_bytes_per_second=5e8)
    with nothing_leaks(), EmulatedDevice(rates=rates, clock=clock) as device:
        found = measure_copies(device, seconds=0.05, clock=clock, piece_bytes=MIB)
        assert device.bytes_in_use == 0
    assert found.ram_to_gpu.per_second == pytest.approx(2e9)
    assert found.gpu_to_ram.per_second == pytest.approx(5e8)
    assert found.is_pinned


class SharedLink(CpuDevice):
    """A device whose two directions share one link, on a clock of its own."""

    shares_ram = False

    def __init__(self, clock: HandClock, *, is_shared: bool, can_pin: bool = True) -> None:
        super().__init__(memory_bytes=64 * MIB)
        self.clock, self.is_shared, self.can_pin = clock, is_shared, can_pin
        self.busy_until = {Lane.RAM_TO_GPU: 0.0, Lane.GPU_TO_RAM: 0.0}

    def pin(self, address: int, nbytes: int) -> None:
        if not self.can_pin:
            raise HardwareError("no", why="the system refused", remedy="none")
        super().pin(address, nbytes)

    def copy_async(self, dst, src, *, lane, after=()):  # type: ignore[no-untyped-def]
        link = Lane.RAM_TO_GPU if self.is_shared else lane
        start = max(self.clock.seconds, self.busy_until[link])
        self.busy_until[link] = start + dst.nbytes / 1e9
        return self.busy_until[link]

    def wait(self, event):  # type: ignore[no-untyped-def]
        self.clock.seconds = max(self.clock.seconds, event)


@pytest.mark.parametrize(("is_shared", "slowdown"), [(True, 2.0), (False, 1.0)])
def test_a_link_that_both_ways_share_is_half_as_fast_with_both_busy(
    is_shared: bool, slowdown: float
) -> None:
    clock = HandClock()
    device: Device = SharedLink(clock, is_shared=is_shared)
    found = measure_copies(device, seconds=0.05, clock=clock)
    assert found.ram_to_gpu.per_second == pytest.approx(1e9)
    assert found.both_ways_slowdown == pytest.approx(slowdown)
    assert found.gpu_to_ram_per_second == pytest.approx(1e9 / slowdown)
    assert found.ram_to_gpu_per_second == pytest.approx(1e9 / slowdown)


def test_memory_that_cannot_be_pinned_is_measured_all_the_same() -> None:
    clock = HandClock()
    device = SharedLink(clock, is_shared=False, can_pin=False)
    assert not measure_copies(device, seconds=0.01, clock=clock).is_pinned


def test_pieces_fit_a_small_device() -> None:
    clock = HandClock()
    rates = EmulatedRates(ram_to_gpu_bytes_per_second=1e9, gpu_to_ram_bytes_per_second=1e9)
    with EmulatedDevice(memory_bytes=9 * MIB, rates=rates, clock=clock) as device:
        measure_copies(device, seconds=0.01, clock=clock)
        assert device.peak_bytes <= 9 * MIB
    with (
        nothing_leaks(),
        EmulatedDevice(memory_bytes=600 * KIB, clock=clock) as device,
        pytest.raises(DoesNotFit),
    ):
        measure_copies(device, seconds=0.01, clock=clock)


def test_the_cpu_device_copies_memory() -> None:
    with CpuDevice() as device:
        found = measure_copies(device, seconds=0.001, clock=time.perf_counter, piece_bytes=MIB)
    assert found.both_ways_slowdown == 1
    assert found.ram_to_gpu.per_second > 0
    assert not found.is_pinned
    assert measure_ram_copies(seconds=0.001, clock=time.perf_counter, piece_bytes=MIB).samples
