"""What each kind of accelerator does its own way: one row per vendor. Names CUDA, as no other file.

Owns the table and the vendors' calls behind it. Whatever torch has one call for is not here but in
`accelerator.py`, the only caller.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lohan.device.memory import operators_unseen
from lohan.errors import HardwareError
from lohan.units import MIB, format_bytes

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """One kind of accelerator."""

    lock_range: Callable[[torch.device, int, int], None]
    """Pin main memory, exactly these bytes: no rounding to powers of two. Or raise."""
    unlock_range: Callable[[torch.device, int], None]
    event_settings: Mapping[str, Any] = field(default_factory=dict)
    allocator_settings: str = ""
    """Where users have not set any themselves (PYTORCH_ALLOC_CONF)."""
    reserve_bytes: int = 0
    """Of what is free, left for what does not come from torch's allocator."""

    def set_allocator(self) -> None:
        """Apply the settings of the allocator; what it holds already stays as it is."""
        is_set = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
        if self.allocator_settings and not is_set:
            torch._C._accelerator_setAllocatorSettings(self.allocator_settings)


def vendor_of(kind: str) -> Vendor:
    """The row of a kind of device, as torch names it."""
    return _VENDORS.get(kind, _OTHER)


def _refused(doing: str, why: str, remedy: str) -> HardwareError:
    return HardwareError(f"{doing} was refused", why=why, remedy=remedy)


def _cuda_call(name: str, device: torch.device, *args: int) -> str | None:
    """Call the runtime library; what it says if it refuses."""
    runtime: Any = torch.cuda.cudart()
    result = getattr(runtime, name)(*args)
    if int(result) == 0:
        return None
    # The runtime hands a refusal on to the next kernel launch of this thread, which would fail for
    # no reason of its own; torch has no call to clear it, so a launch of ours takes it.
    with contextlib.suppress(RuntimeError), operators_unseen():
        torch.zeros(1, dtype=torch.uint8, device=device).add_(1)
    return f"the driver says: {runtime.cudaGetErrorString(result)} (error {int(result)})"


def _cuda_lock(device: torch.device, address: int, nbytes: int) -> None:
    why = _cuda_call("cudaHostRegister", device, address, nbytes, _HOST_REGISTER_PORTABLE)
    if why is not None:
        doing = f"pinning {format_bytes(nbytes)} of main memory"
        raise _refused(doing, why, "free main memory, or go on unpinned at a lower rate")


def _cuda_unlock(device: torch.device, address: int) -> None:
    why = _cuda_call("cudaHostUnregister", device, address)
    if why is not None:
        raise _refused(f"unpinning {address:#x}", why, "unpin memory before it is freed")


def _other_lock(device: torch.device, address: int, nbytes: int) -> None:
    register = getattr(torch.get_device_module(device), "host_register", None)
    if register is None:
        raise _refused(
            f"pinning {format_bytes(nbytes)} of main memory",
            f"torch has no call that pins memory in place for {device.type}",
            "go on unpinned at a lower rate",
        )
    register(address, nbytes)


def _other_unlock(device: torch.device, address: int) -> None:
    torch.get_device_module(device).host_unregister(address)


_OTHER = Vendor(lock_range=_other_lock, unlock_range=_other_unlock)
"""Kinds without a row: what a device module brings by the usual names is used."""
_VENDORS = {
    # Also ROCm, which torch calls by this name. Blocking: a thread that waits for an event sleeps,
    # and does not take a core from the optimizer.
    "cuda": Vendor(
        lock_range=_cuda_lock,
        unlock_range=_cuda_unlock,
        event_settings={"blocking": True},
        # Segments that grow leave fewer holes; on ROCm not every system has them.
        allocator_settings="" if torch.version.hip else "expandable_segments:True",
        # Kernels are loaded when they are first used, libraries make workspaces per thread.
        reserve_bytes=600 * MIB,
    ),
    "xpu": replace(_OTHER, reserve_bytes=600 * MIB),
}
KINDS = tuple(_VENDORS)
"""Names that are known whether torch was built for them or not."""
