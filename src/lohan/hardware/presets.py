"""Machines by name: the paper's server, and boxes people really have.

Owns how `machines.toml` is read, which holds the numbers and says where each comes from.
"""

import tomllib
from importlib import resources
from typing import Any

from lohan.errors import ConfigError, nearest_names
from lohan.hardware.machine import Gpu, Machine, Ssd, SsdPath
from lohan.units import parse_bytes

_KNOWN = tomllib.loads(
    (resources.files("lohan.hardware") / "machines.toml").read_text(encoding="utf-8")
)
MACHINE_NAMES: tuple[str, ...] = tuple(_KNOWN["machines"])
"""Every preset, in the order they are listed to the user."""


def machine_named(name: str) -> Machine:
    """Return a preset machine.

    Raises:
        ConfigError: if there is none of that name; the message names the nearest.
    """
    known = name.strip().casefold()
    if known not in MACHINE_NAMES:
        raise ConfigError(
            f'there is no machine named "{name}"',
            why="it is neither a preset nor the path of a .json file",
            remedy=f"{nearest_names(name, MACHINE_NAMES)}, or give the path of a machine file "
            "(.json)",
        )
    box = dict(_KNOWN["machines"][known])
    if "like" in box:
        box = _KNOWN["machines"][box.pop("like")] | box
    gpu = _numbers(_KNOWN["gpus"][box["gpu"]])
    by_dtype = tuple(gpu.pop("flops_per_second_by_dtype", {}).items())
    drives = box["ssds"]
    parts = {
        "gpu": Gpu(**gpu, flops_per_second_by_dtype=by_dtype),
        "ssds": (Ssd(**_numbers(_KNOWN["ssds"][drives["drive"]])),) * drives["count"],
        "ssd_path": SsdPath(**box["ssd_path"]),
    }
    return Machine(name=known, **_numbers(box) | parts)


def _numbers(found: dict[str, Any]) -> dict[str, Any]:
    return {key: parse_bytes(one) if key.endswith("_bytes") else one for key, one in found.items()}


def machine_from(text: str) -> Machine:
    """Return the machine a user means: a preset's name, or the path of a .json file.

    Raises:
        ConfigError: if it is neither, or the file is no machine.
    """
    return Machine.load(text) if text.lower().endswith(".json") else machine_named(text)
