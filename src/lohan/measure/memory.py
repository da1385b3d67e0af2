"""How much RAM and GPU memory a plan may count on: what is free now, or what the user allows.

Owns how main memory is shared with a device that has none of its own. What is free is asked in
`lohan.hardware.limits`. Called when a machine is measured, and again whenever a profile is used.
"""

from lohan.device import Device
from lohan.errors import DoesNotFit
from lohan.hardware.limits import AvailableRam, available_ram_bytes, is_bound_by_locking
from lohan.units import MIB, format_bytes

_LEAST_BYTES = 64 * MIB


def memory_to_plan_with(
    device: Device,
    ram_bytes: int | None,
    gpu_bytes: int | None,
    *,
    available: AvailableRam | None = None,
) -> tuple[int, int, str]:
    """RAM and GPU bytes to plan with, and what bounds the RAM.

    A device without memory of its own takes its part of main memory: half, unless told otherwise.
    `available` is what may still be taken; asked from the system if not given.

    Raises:
        DoesNotFit: hardly anything is left.
    """
    if available is None:
        available = available_ram_bytes(counts_locked=is_bound_by_locking(device))
    gpu = gpu_bytes or device.memory_bytes
    is_main_memory = device.torch_device.type == "cpu"
    if gpu is None:
        gpu = available.bytes - ram_bytes if ram_bytes is not None else available.bytes // 2
    if ram_bytes is not None:
        ram, why = ram_bytes, "as asked for"
    elif is_main_memory:
        ram = available.bytes - gpu
        why = f"{available.reason}; {format_bytes(gpu)} of it stand in for GPU memory"
    else:
        ram, why = available.bytes, available.reason
    if min(ram, gpu) < _LEAST_BYTES:
        raise DoesNotFit(
            f"{format_bytes(max(0, ram))} of RAM and {format_bytes(max(0, gpu))} of GPU memory "
            "are left",
            why=f"nothing can be trained with so little; {available.reason}",
            remedy="close what else uses memory, raise the limit, or give other budgets",
        )
    return ram, gpu, why
