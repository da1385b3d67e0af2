"""Tensors that compute makes are counted exactly, for as long as anything holds them."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lohan.device import CpuDevice, Device, EmulatedDevice
from lohan.errors import DoesNotFit

KIB = 1024


@pytest.fixture
def device() -> Iterator[Device]:
    with EmulatedDevice(memory_bytes=64 * KIB) as one:
        yield one


def test_a_tensor_counts_until_its_last_view_dies(device: Device) -> None:
    with device.compute():
        tensor = torch.zeros(KIB)
        view = tensor.view(32, 32)[3:].t()
    assert device.bytes_in_use == 4 * KIB
    del tensor
    assert device.bytes_in_use == 4 * KIB
    del view
    assert device.bytes_in_use == 0
    assert device.peak_bytes == 4 * KIB


def test_what_autograd_saved_counts_until_backward(device: Device) -> None:
    weight = torch.ones(KIB, requires_grad=True)  # made outside: not on the device
    with device.compute():
        out = (weight * 2).exp().sum()
        assert device.bytes_in_use == 4 * KIB + 4  # the result of exp is saved, the sum is held
        out.backward()
    assert device.bytes_in_use == 4 * KIB + 4  # the gradient, the sum
    weight.grad = None
    del out
    assert device.bytes_in_use == 0


def test_operators_in_place_and_views_allocate_nothing(device: Device) -> None:
    slot = device.alloc(4 * KIB)
    with device.compute():
        view = slot.tensor(torch.float32, (KIB,))
        view.zero_().add_(1)[5:].mul_(2)
        torch.add(view, view, out=view)
    assert device.bytes_in_use == 4 * KIB


def test_a_view_that_calls_itself_new_allocates_nothing(device: Device) -> None:
    slot = device.alloc(4 * KIB)
    with device.compute():
        view = slot.tensor(torch.float32, (32, 32))
        again = torch.ops.aten._unsafe_view(view, [KIB])
        assert device.bytes_in_use == 4 * KIB
        del view, again
    assert device.bytes_in_use == 4 * KIB


def test_several_results_of_one_operator_all_count(device: Device) -> None:
    with device.compute():
        parts = torch.rand(KIB).sort()
    assert device.bytes_in_use == 4 * KIB + 8 * KIB
    del parts
    assert device.bytes_in_use == 0


def test_compute_beyond_the_budget_does_not_fit(device: Device) -> None:
    slot = device.alloc(40 * KIB)
    with device.compute():
        held = torch.zeros(5 * KIB)
        with pytest.raises(DoesNotFit) as caught:
            torch.zeros(2 * KIB)
    message = str(caught.value)
    for part in ("8.0 KiB", "needs 68.0 KiB", "64.0 KiB allowed", "40.0 KiB are", "20.0 KiB are"):
        assert part in message
    assert "gpu budget" in caught.value.remedy
    del held
    device.free(slot)
    assert device.bytes_in_use == 0


def test_backward_beyond_the_budget_does_not_fit(device: Device) -> None:
    weight = torch.ones(8 * KIB, requires_grad=True)
    with device.compute():
        out = weight.exp().sum()
        with pytest.raises(DoesNotFit):
            out.backward()
    del out, weight
    gc.collect()
    assert device.bytes_in_use == 0


def test_tensors_outside_compute_do_not_count(device: Device) -> None:
    held = torch.zeros(KIB)
    assert device.bytes_in_use == 0
    with device.compute():
        view = held.view(-1)
    assert device.bytes_in_use == 0
    assert view.numel() == held.numel()


def test_compute_within_compute_counts_once(device: Device) -> None:
    with device.compute(), device.compute():
        held = torch.zeros(KIB)
    assert device.bytes_in_use == held.numel() * 4


def test_sparse_gradients_pass_uncounted(device: Device) -> None:
    table = torch.nn.Embedding(8, 4, sparse=True)
    with device.compute():
        table(torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse


def test_the_cpu_device_leaves_compute_uncounted() -> None:
    with CpuDevice() as device, device.compute():
        held = torch.zeros(KIB)
        assert device.bytes_in_use == 0
    assert held.numel() == KIB


def test_fake_tensors_take_no_memory() -> None:
    """Blocks are captured on them within the device's compute, however large their values are."""
    with EmulatedDevice(memory_bytes=1 << 20) as device, device.compute():
        with FakeTensorMode():
            held = [torch.ones(1 << 20) + 1 for _ in range(3)]
        assert device.peak_bytes == 0
        assert held[0].is_cpu
