"""Chooses a device from what the user wrote, or from what the machine has.

Owns the names users write and the words that explain the choice. Called by the engine and the
command line; nothing else makes devices outside tests.
"""

import re

import torch

from lohan import matrix_tiles
from lohan.device.cpu import CpuDevice
from lohan.device.device import Device
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ConfigError, nearest_names

_NUMBERED = re.compile(r"(?P<kind>[a-z_]+)(?::(?P<index>\d+))?")


def _name(text: str | None) -> str | None:
    return None if text is None else text.strip().lower()


def torch_device_named(text: str | None) -> torch.device:
    """Where the device of that name computes. Opens nothing; a name that is wrong is refused by
    whoever opens it."""
    from lohan.device.accelerator import why_absent

    name = _name(text)
    match = _NUMBERED.fullmatch(name or "cpu")
    if name is None and why_absent() is None:
        found = torch.accelerator.current_accelerator()
        match = _NUMBERED.fullmatch(found.type) if found is not None else match
    if match is None or why_absent(match["kind"]) is not None:
        return torch.device("cpu")
    index = match["index"]
    return torch.device(
        match["kind"],
        torch.accelerator.current_device_index() if index is None else int(index),
    )


def open_device(
    text: str | None = None,
    *,
    memory_bytes: int | None = None,
    place: int = 0,
    num_here: int = 1,
) -> Device:
    """Open `"cpu"`, `"emulated"`, `"cuda"`, `"cuda:n"` or another accelerator of torch by its name.

    None takes a GPU if there is one. Of several ranks on a machine (`num_here`) each has a GPU of
    its own, by its `place` among them, unless torch was told which to use or the name has a number.

    The device's `reason` says why it was chosen.

    Raises:
        ConfigError: if the text names no device, or ranks would share one and each take all of it.
        HardwareError: if the device is not there.
        DoesNotFit: if it has fewer bytes than `memory_bytes`.
    """
    if memory_bytes is not None and memory_bytes <= 0:
        raise ConfigError(
            f"the gpu budget is {memory_bytes} bytes",
            why="nothing can be computed without memory",
            remedy="give a size such as 8GiB, or leave it out",
        )
    name = _name(text)
    asked = f"{text!r} was asked for"
    # Devices that compute on the processor say what it was told to leave out.
    note = f"; {matrix_tiles.NOTE}" if matrix_tiles.NOTE else ""
    if name == "cpu":
        return CpuDevice(memory_bytes=memory_bytes, reason=asked + note)
    if name == "emulated":
        return EmulatedDevice(memory_bytes=memory_bytes, reason=asked + note)
    # Here and not above: asking the driver takes time, and most callers know what they want.
    from lohan.device.accelerator import AcceleratorDevice, names, why_absent

    if name is None:
        absence = why_absent()
        if absence is not None:
            reason = f"no GPU can be used ({absence}), so main memory and processor stand in"
            return CpuDevice(memory_bytes=memory_bytes, reason=reason + note)
        index = _own_index(place, num_here, memory_bytes)
        return AcceleratorDevice(None, index, memory_bytes=memory_bytes, reason="a GPU was found")
    match = _NUMBERED.fullmatch(name)
    if match is None or match["kind"] not in names():
        known = ("cpu", "emulated", *names(), f"{names()[0]}:0")
        raise ConfigError(
            f"{text!r} is not a device",
            why=f"known are {', '.join(known)}",
            remedy=f"{nearest_names(name, known)}, or leave it out to have one chosen",
        )
    if match["index"] is not None:
        index = int(match["index"])
    else:
        index = _own_index(place, num_here, memory_bytes)
    return AcceleratorDevice(match["kind"], index, memory_bytes=memory_bytes, reason=asked)


def _own_index(place: int, num_here: int, memory_bytes: int | None) -> int | None:
    """Which GPU is this rank's; None: the one torch would use."""
    count = torch.accelerator.device_count()
    if num_here == 1 or count == 0 or torch.accelerator.current_device_index() != 0:
        return None
    if num_here > count and memory_bytes is None:
        raise ConfigError(
            f"{num_here} ranks on this machine have {count} GPU(s)",
            why="each would plan with all memory of the one it shares",
            remedy='start one rank per GPU, or say what each may use (gpu="8GiB")',
        )
    return place % count
