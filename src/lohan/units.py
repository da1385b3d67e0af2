"""Sizes, rates and durations as people write them: `"8GiB"`, `"7GB/s"`, `"1h 05m"`.

Owns parsing and printing. Inside the code base a size is an int of bytes, a rate a float of bytes
per second and a duration a float of seconds; text exists only at the edges.
"""

import math
import re
import sys
from fractions import Fraction

from lohan.errors import ConfigError

KB, MB, GB, TB, PB = 10**3, 10**6, 10**9, 10**12, 10**15
KIB, MIB, GIB, TIB, PIB = 2**10, 2**20, 2**30, 2**40, 2**50

_BYTES_PER_UNIT = {
    "": 1,
    "b": 1,
    "kb": KB,
    "mb": MB,
    "gb": GB,
    "tb": TB,
    "pb": PB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "pib": PIB,
}
_QUANTITY = re.compile(
    r"^\s*(?P<number>\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*(?P<unit>[a-zA-Z]*)\s*$", re.ASCII
)
_BITS = re.compile(r"^[KMGTP]i?b$")
_SIZE_REMEDY = 'write a number and a unit, such as "512MiB", "8GiB" or "64GB"'
_RATE_REMEDY = 'write a size per second, such as "7GB/s" or "900MB/s"'


def _parse(quantity: str, *, whole: object, noun: str, remedy: str) -> Fraction:
    """Return the exact number of bytes in a text; `whole` is what the user wrote."""
    match = _QUANTITY.match(quantity)
    scale = _BYTES_PER_UNIT.get(match["unit"].lower()) if match else None
    if match is None or scale is None:
        raise ConfigError(
            f"{whole!r} is not a {noun}",
            why="a number of 0 or more with one of the units B, KB, MB, GB, TB, PB, KiB, MiB, GiB, "
            "TiB, PiB was expected",
            remedy=remedy,
        )
    if _BITS.match(match["unit"]):
        raise ConfigError(
            f"{whole!r} is not a {noun}",
            why=f'"{match["unit"]}" with a small b means bits, and sizes are in bytes',
            remedy=remedy,
        )
    # The test as a float comes first: a fraction of 1e999999999 would take all memory.
    if not math.isfinite(float(match["number"]) * scale):
        raise ConfigError(f"{whole!r} is not a {noun}", why="it is not finite", remedy=remedy)
    return Fraction(match["number"]) * scale


def parse_bytes(size: str | int) -> int:
    """Return a size in bytes. Units of 1000 (`GB`) and of 1024 (`GiB`) are told apart.

    Raises:
        ConfigError: if the text is no size, or the number is negative.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ConfigError(
                f"{size} is not a size", why="it is negative", remedy="give 0 bytes or more"
            )
        return size
    return round(_parse(str(size), whole=size, noun="size", remedy=_SIZE_REMEDY))


def parse_rate(rate: str | float) -> float:
    """Return a rate in bytes per second from text such as `"7GB/s"`, or a number as it is.

    Raises:
        ConfigError: if the text is no rate, or it is not positive.
    """
    if isinstance(rate, str):
        stem, slash, per = rate.strip().rpartition("/")
        if not slash or per.strip().lower() not in ("s", "sec", "second"):
            raise ConfigError(
                f"{rate!r} is not a rate", why='"/s" is missing at its end', remedy=_RATE_REMEDY
            )
        value = float(_parse(stem, whole=rate, noun="rate", remedy=_RATE_REMEDY))
    elif isinstance(rate, int | float) and not isinstance(rate, bool):
        # A whole number too large for a float is as infinite as one can be.
        value = float(rate) if abs(rate) <= sys.float_info.max else math.inf
    else:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{rate!r} is not a rate",
            why="a rate must be above zero and finite",
            remedy=_RATE_REMEDY,
        )
    return value


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return f"{value} {units[0]}"
    scaled, unit = float(value), units[0]
    for unit in units:
        # 999.95 would print as "1000.0": the next unit is due as soon as rounding reaches it.
        if abs(scaled) < step - (0.05 if step == 1000 else 0.5) or unit == units[-1]:
            break
        scaled /= step
    digits = 0 if unit == units[0] and scaled == int(scaled) else 1
    return f"{scaled:.{digits}f} {unit}"


def format_bytes(size_bytes: float) -> str:
    """Print a size in binary units: `143.2 GiB`."""
    return _scaled(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_bytes_decimal(size_bytes: float) -> str:
    """Print a size in decimal units, as drives and their endurance are sold: `3.8 TB`."""
    return _scaled(size_bytes, 1000, ("B", "KB", "MB", "GB", "TB", "PB"))


def format_rate(bytes_per_second: float) -> str:
    """Print a rate in decimal units, as drives and links are sold: `7.0 GB/s`."""
    return f"{format_bytes_decimal(bytes_per_second)}/s"


def format_seconds(seconds: float) -> str:
    """Print a duration: `6.5 us`, `840 us`, `3.2 ms`, `12.4 s`, `2m 05s`, `1h 05m`, `3d 04h`."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-6:
        return f"{seconds * 1e9:.0f} ns"
    if seconds < 99.95e-6:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 119.95:
        return f"{seconds:.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 3600:
        return f"{whole_seconds // 60}m {whole_seconds % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d {hours % 24:02d}h"


def format_count(count: float) -> str:
    """Print a count of parameters or tokens: `135M`, `12.9B`, `1.2T`."""
    if not math.isfinite(count):
        return str(count)
    scaled, unit = float(count), ""
    for unit in ("", "K", "M", "B", "T"):
        if abs(scaled) < 999.5 or unit == "T":
            break
        scaled /= 1000
    if unit == "":
        return f"{scaled:.0f}"
    return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.95 else f"{scaled:.3g}{unit}"
