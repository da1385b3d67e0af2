"""How much freed memory the process's own allocator may hold back.

On the cpu device activations come from `malloc`, whose habit is to keep up to 64 MiB of freed
memory, and more per thread: nothing beside gigabytes, but a good part of a small budget. Owns this
one setting of the whole process. Called by `attach`.
"""

import ctypes

from lohan.units import KIB, MIB

# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_LEAST_BYTES = 128 * KIB
_USUAL_BYTES = 32 * MIB
"""What the allocator comes to by itself once large tensors have been freed."""
_PART_OF_BUDGET = 64


def bound_held_memory(budget_bytes: int) -> int | None:
    """Make tensors above a 64th of a budget go back to the system when they are freed.

    Returns that size; None where the usual habit is as good, or cannot be changed. The setting
    stays: there is no way back to the habit, and it costs time only (new pages for large tensors).
    """
    threshold_bytes = max(_LEAST_BYTES, budget_bytes // _PART_OF_BUDGET)
    if threshold_bytes >= _USUAL_BYTES:
        return None
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return None  # Another C library: its habits are not known.
    is_set = mallopt(_MMAP_THRESHOLD, threshold_bytes) and mallopt(_TRIM_THRESHOLD, threshold_bytes)
    mallopt(_ARENA_MAX, 1)
    return threshold_bytes if is_set else None
