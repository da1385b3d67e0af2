"""Plans for less as candidates: fewer drives, less RAM, clipping, and all of them together.

What is planned for less can be run with more, so a search that looks at these too does not get
worse where a machine gets better. Numbers of drives and sizes of RAM are on a fixed grid beside the
machine's own, so that what a smaller machine looked at a larger one looks at too. Owns the grid and
the way through it; how a plan is made and whether it is any good the caller says.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from lohan.fields import LEAST_RATE
from lohan.hardware.machine import Machine
from lohan.plan.plan import Plan
from lohan.plan.workload import Workload

_DRIVE_COUNTS = (24, 16, 12, 8, 7, 6, 5, 4, 3, 2, 1.5, 1, 0.75, 0.5, 0.375)
_NUM_RAM_SIZES, _RAM_SHARES = 5, (1.5, 2**0.5, 1.0)  # Shares of the powers of two.


def drive_counts(num_ssds: int) -> list[float]:
    """Numbers of drives, fractions of one included, to plan for on a machine with so many."""
    counts: list[float] = [num_ssds, num_ssds - 1, *_DRIVE_COUNTS]
    return sorted({count for count in counts if 0 < count <= num_ssds}, reverse=True)


def with_drives_of(machine: Machine, count: float) -> Machine:
    """The machine with drives that together are as fast as so many of them, and as large as now."""
    share = count / len(machine.ssds)
    ssds = tuple(
        replace(
            ssd,
            read_bytes_per_second=max(ssd.read_bytes_per_second * share, LEAST_RATE),
            write_bytes_per_second=max(ssd.write_bytes_per_second * share, LEAST_RATE),
        )
        for ssd in machine.ssds
    )
    return replace(machine, ssds=ssds)


def ram_sizes(ram_bytes: int) -> list[int]:
    """Sizes of RAM to plan for: the machine's own, and the next ones of the grid below it."""
    power = math.floor(math.log2(ram_bytes))
    grid = [round(share * 2.0**down) for down in range(power, -1, -1) for share in _RAM_SHARES]
    return [ram_bytes, *[size for size in grid if size < ram_bytes][:_NUM_RAM_SIZES]]


def lesser_plans(
    machine: Machine,
    workload: Workload,
    plan_for: Callable[[Machine, Workload], Plan | None],
    may_help: Callable[[Plan], bool],
) -> Iterator[Plan]:
    """Plans for the machine as asked and for less, as long as one `may_help`; some come twice."""
    counts = drive_counts(len(machine.ssds))
    clipped = replace(workload, clips_gradients=True)
    for ram_bytes in ram_sizes(machine.ram_bytes):
        smaller = machine.with_ram(ram_bytes)
        for asked in dict.fromkeys((workload, clipped)):
            for count in counts:
                plan = plan_for(with_drives_of(smaller, count), asked)
                if plan is not None and may_help(plan):
                    yield plan
                elif (count, asked) == (counts[0], workload) and ram_bytes < machine.ram_bytes:
                    return  # Less RAM moves more, and still less still more.
                else:
                    break  # A plan for slower drives computes more.
