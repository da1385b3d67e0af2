"""Does this device keep its promises here? The heart of its contract, in well under a second.

Owns a few checks that any device must pass on the machine it is used on: bytes come back as they
went, queues keep their order, compute waits, budgets hold. The whole contract is judged by
tests/contract/test_device_contract.py. Called by `lohan doctor`.
"""

from collections.abc import Callable

import torch

from lohan.device.device import Device
from lohan.errors import DoesNotFit, LohanError
from lohan.vocabulary import Lane

_NUM_BYTES = 1 << 20
_NUM_ROUNDS = 6
_UP, _DOWN = Lane.RAM_TO_GPU, Lane.GPU_TO_RAM


def failed_promises(device: Device) -> list[str]:
    """What the device does not do as promised, in words; nothing if all is well."""
    checks: dict[str, Callable[[Device], bool]] = {
        "bytes copied there and back are not the same": _returns_bytes,
        "copies and compute of a chain do not keep their order": _keeps_order,
        "a product of matrices is wrong": _computes,
        "random numbers do not repeat from a kept state": _repeats_random_numbers,
        "memory beyond its budget is handed out": _keeps_to_its_budget,
    }
    found = []
    for failure, is_kept in checks.items():
        try:
            if not is_kept(device):
                found.append(failure)
        except (LohanError, RuntimeError) as error:
            found.append(f"{failure} ({' '.join(str(error).split())[:300]})")
    return found


def _returns_bytes(device: Device) -> bool:
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(0, 256, (_NUM_BYTES,), dtype=torch.uint8, generator=generator)
    back = torch.zeros_like(source)
    slot = device.alloc(_NUM_BYTES)
    try:
        up = device.copy_async(slot, source, lane=_UP)
        device.wait(device.copy_async(back, slot, lane=_DOWN, after=[up]))
    finally:
        device.free(slot)
    return torch.equal(back, source)


def _keeps_order(device: Device) -> bool:
    """Two slots in turn, with compute in between, and the host waiting only at the end."""
    count = _NUM_BYTES // 4
    buffers = [torch.full((count,), 1.0) for _ in range(_NUM_ROUNDS)]
    slots = [device.alloc(_NUM_BYTES) for _ in range(2)]
    try:
        is_free = [device.record(), device.record()]
        for number, buffer in enumerate(buffers):
            slot = slots[number % 2]
            arrived = device.copy_async(slot, buffer, lane=_UP, after=[is_free[number % 2]])
            with device.compute():
                device.compute_waits(arrived)
                slot.tensor(torch.float32, (count,)).add_(number)
            is_free[number % 2] = device.copy_async(
                buffer, slot, lane=_DOWN, after=[device.record()]
            )
        device.synchronize()
    finally:
        for slot in slots:
            device.free(slot)
    return all(bool((one == 1.0 + number).all()) for number, one in enumerate(buffers))


def _computes(device: Device) -> bool:
    generator = torch.Generator().manual_seed(2)
    # Whole numbers this small have one product in every number format and order.
    left, right = (
        torch.randint(-4, 5, (64, 64), generator=generator).to(torch.bfloat16) for _ in range(2)
    )
    expected = left.float() @ right.float()
    with device.compute():
        product = (left.to(device.torch_device) @ right.to(device.torch_device)).float().cpu()
    return torch.equal(product, expected.to(torch.bfloat16).float())


def _repeats_random_numbers(device: Device) -> bool:
    before = device.rng_state()
    try:
        with device.compute():
            first = torch.rand(64, device=device.torch_device)
            device.set_rng_state(before)
            second = torch.rand(64, device=device.torch_device)
            return torch.equal(first, second)
    finally:
        device.set_rng_state(before)


def _keeps_to_its_budget(device: Device) -> bool:
    if device.memory_bytes is None:
        return True
    try:
        slot = device.alloc(device.memory_bytes + 1)
    except DoesNotFit:
        return True
    device.free(slot)
    return False
