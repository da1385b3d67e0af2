"""Lesser requests whose plans are candidates: fewer drives, a little less RAM, clipping.

What is planned for less can be run with more, so a search that looks at these too does not get
worse where a machine gets better. Numbers of drives and sizes of RAM are on a fixed grid beside the
machine's own, so that machines near each other share them. Owns the grid; plans nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from lohan.fields import LEAST_RATE
from lohan.hardware.machine import Machine
from lohan.plan.workload import Workload

_RUNGS_PER_DOUBLING = 2
"""Sizes of RAM on the grid: the powers of two and one between each two of them."""
_NUM_GRID_COUNTS = 3
"""Numbers of drives on the grid that are tried beside the next smaller one."""


def drive_counts(num_ssds: int) -> list[float]:
    """Numbers of drives, fractions of one included, to plan for on a machine with so many."""
    counts = [float(num_ssds)]
    if num_ssds > 1:
        counts.append(num_ssds - 1.0)
    # The powers of two, and halfway between each two of them: 1, 1.5, 2, 3, 4, 6, 8, 12.
    power = math.floor(math.log2(num_ssds))
    grid = [share * 2.0**down for down in range(power, power - 4, -1) for share in (1.5, 1.0)]
    return [*counts, *[count for count in grid if count < counts[-1]][:_NUM_GRID_COUNTS]]


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


def ram_below(ram_bytes: int) -> int:
    """The next smaller size of RAM on the grid."""
    rung = math.ceil(math.log2(ram_bytes) * _RUNGS_PER_DOUBLING - 1e-9) - 1
    return max(1, round(2 ** (rung / _RUNGS_PER_DOUBLING)))


def lesser_requests(machine: Machine, workload: Workload) -> Iterator[tuple[Machine, Workload]]:
    """What else to plan for: fewer drives, less RAM, clipping where there is none."""
    for count in drive_counts(len(machine.ssds))[1:]:
        yield with_drives_of(machine, count), workload
    yield machine.with_ram(ram_below(machine.ram_bytes)), workload
    if not workload.clips_gradients:
        yield machine, replace(workload, clips_gradients=True)
