"""How much RAM would be enough, for the error of a run that is refused.

Owns the search and the sentence. Whether a budget fits is asked of the caller. Called by `attach`.
"""

from collections.abc import Callable

from lohan.errors import DoesNotFit
from lohan.units import format_bytes

_NUM_DOUBLINGS = 7
_NUM_HALVINGS = 4


def with_enough_ram(error: DoesNotFit, ram_bytes: int, fits: Callable[[int], bool]) -> DoesNotFit:
    """The refusal with the RAM that would do, to some percent; as it is where RAM does not help."""
    if fits(ram_bytes):
        return error  # something else is short
    high = ram_bytes
    for _ in range(_NUM_DOUBLINGS):
        high *= 2
        if fits(high):
            break
    else:
        return error
    low = high // 2
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return DoesNotFit(
        f"{error.what} (the budget of RAM is {format_bytes(ram_bytes)})",
        why=error.why,
        remedy=f"a budget of {format_bytes(high)} is enough (offload.ram, --ram); or "
        f"{error.remedy}",
    )
