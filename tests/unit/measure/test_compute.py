"""Compute: FLOPs are the planner's, a set rate comes out, sizes keep to the device's memory."""

import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lohan.device import CpuDevice, EmulatedDevice, EmulatedRates
from lohan.errors import DoesNotFit, HardwareError
from lohan.measure import compute
from lohan.measure.compute import Block, flops_of_pass, measure_compute
from lohan.model.tracing.flops import flops_of
from lohan.units import KIB, MIB
from support.timed_engine import HandClock

TINY = ((8, 64), (16, 128), (32, 256))


class CountFlops(TorchDispatchMode):
    num_flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_flops += flops_of(func, args, kwargs or {}, result)
        return result


@pytest.mark.parametrize(("tokens", "width"), [(16, 128), (48, 64), (7, 192)])
def test_flops_are_those_the_planner_counts(tokens: int, width: int) -> None:
    block = Block(width, device=torch.device("cpu"))
    x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    with CountFlops() as counted:
        out = block(x)
        torch.autograd.backward(out, torch.ones_like(out))
    assert flops_of_pass(block, tokens) == counted.num_flops


def test_the_rate_of_an_emulated_device_comes_out() -> None:
    clock = HandClock()
    rates = EmulatedRates(flops_per_second=1e9, memory_bytes_per_second=3e9)
    with EmulatedDevice(rates=rates, clock=clock, memory_bytes=256 * MIB) as device:
        found = measure_compute(
            device, seconds=0.03, clock=clock, sizes=TINY, memory_piece_bytes=MIB
        )
        assert device.bytes_in_use == 0
    assert found.flops.per_second == pytest.approx(1e9)
    assert found.memory.per_second == pytest.approx(3e9)
    assert found.flops.spread == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("flops_per_second", "size"), [(4e9, TINY[-1]), (1e3, TINY[0])])
def test_a_faster_device_gets_a_larger_block(
    flops_per_second: float, size: tuple[int, int]
) -> None:
    clock = HandClock()
    rates = EmulatedRates(flops_per_second=flops_per_second, memory_bytes_per_second=1e9)
    with EmulatedDevice(rates=rates, clock=clock) as device:
        found = measure_compute(
            device, seconds=0.05, clock=clock, sizes=TINY, memory_piece_bytes=MIB
        )
    assert (found.tokens, found.width) == size


def test_a_block_keeps_to_the_devices_memory() -> None:
    clock = HandClock()
    rates = EmulatedRates(flops_per_second=4e9, memory_bytes_per_second=1e9)
    with EmulatedDevice(rates=rates, clock=clock, memory_bytes=3 * MIB) as device:
        found = measure_compute(
            device, seconds=0.05, clock=clock, sizes=TINY, memory_piece_bytes=MIB
        )
        assert device.peak_bytes <= 3 * MIB
    assert (found.tokens, found.width) == TINY[1]
    with (
        EmulatedDevice(rates=rates, clock=clock, memory_bytes=64 * KIB) as device,
        pytest.raises(DoesNotFit),
    ):
        measure_compute(device, seconds=0.05, clock=clock, sizes=TINY, memory_piece_bytes=MIB)


def test_a_device_without_bf16_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(block: Block, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for bfloat16\nmore")

    monkeypatch.setattr(compute.Block, "forward", refuse)
    with CpuDevice() as device, pytest.raises(HardwareError, match="no kernel for bfloat16"):
        measure_compute(device, seconds=0.01, clock=time.perf_counter, sizes=TINY)


def test_this_processor_computes() -> None:
    with CpuDevice() as device:
        found = measure_compute(
            device, seconds=1e-3, clock=time.perf_counter, sizes=TINY[:2], memory_piece_bytes=MIB
        )
    assert found.flops.per_second > 0
    assert found.memory.per_second > 0
