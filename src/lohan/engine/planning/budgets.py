"""Budgets of a run, and the least ones that would do where those given do not.

Owns what of main memory the state store works in, and the search for what to tell a user who gave
too little. Does not plan: `plan_run` says whether budgets are enough. Used by `attach` and
`plan_run`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from lohan.engine.planning.write_limit import WriteLimit
from lohan.units import KIB, MIB

_LEAST_SCRATCH_BYTES = 512 * KIB
_MOST_SCRATCH_BYTES = 16 * MIB
# Trace, plan and lanes as Python objects, and with each block the tasks of the schedules that are
# simulated to find a plan: measured 10 to 27 MiB on models of 4 to 60 blocks. Of budgets so small
# that this matters, a share.
_OWN_BYTES = 8 * MIB
_OWN_BYTES_PER_BLOCK = MIB
_OWN_SHARE = 4
# Computing in main memory leaves holes between tensors (up to 9 MiB were measured), and the math
# libraries keep work space and compiled kernels: how much depends on the processor. One took 12 MiB
# more than another from its first step on, which is put down to this.
_MOST_COMPUTING_BYTES = 16 * MIB
_COMPUTING_SHARE = 8
_MOST_DOUBLINGS = 4
_FINEST_SHARE = 64
"""The least is found to within this part of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes the engine may use. Where the device shares RAM, `gpu_bytes` may be open (None)."""

    ram_bytes: int
    gpu_bytes: int | None
    writes: WriteLimit | None = None
    """Of the whole run, to the SSDs."""

    def with_spent(self, nbytes: int) -> Self:
        """The same after so much was written to the SSDs to measure them."""
        if self.writes is None:
            return self
        return replace(self, writes=replace(self.writes, spent_bytes=nbytes))

    @property
    def scratch_bytes(self) -> int:
        """What of RAM the state store reads and writes through when it does so by itself."""
        return min(_MOST_SCRATCH_BYTES, max(_LEAST_SCRATCH_BYTES, self.ram_bytes // 64))

    def reserved_bytes(self, *, num_blocks: int, computes_in_ram: bool) -> int:
        """What of RAM no plan may use: that, and what goes beside buffers and tensors."""
        own_bytes = min(
            _OWN_BYTES + num_blocks * _OWN_BYTES_PER_BLOCK, self.ram_bytes // _OWN_SHARE
        )
        computing_bytes = min(_MOST_COMPUTING_BYTES, self.ram_bytes // _COMPUTING_SHARE)
        return self.scratch_bytes + own_bytes + computes_in_ram * computing_bytes

    def written(self) -> str:
        """As the arguments of `lohan.attach`."""
        ram = f'ram="{_written(self.ram_bytes)}"'
        return ram if self.gpu_bytes is None else f'{ram}, gpu="{_written(self.gpu_bytes)}"'


def least_bytes(estimate: int, fits: Callable[[int], bool]) -> int | None:
    """The least number that fits, in round figures, found around an estimate of it.

    None: several times the estimate does not fit either, so memory is not what lacks.
    """
    high = _rounded_up(estimate)
    low = 0
    for _ in range(_MOST_DOUBLINGS):
        if fits(high):
            break
        low, high = high, _rounded_up(high + max(high // 16, high - low))
    else:
        return None
    if not low:
        # The estimate fits, and is seldom far off.
        low = high - high // 8
        if fits(low):
            low, high = 0, low
    while high - low > max(KIB, high // _FINEST_SHARE):
        middle = _rounded_up((low + high) // 2)
        if middle >= high:
            break
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _unit(nbytes: int) -> tuple[int, str]:
    return (MIB, "MiB") if nbytes >= 64 * MIB else (KIB, "KiB")


def _rounded_up(nbytes: int) -> int:
    unit, _ = _unit(nbytes)
    return -(-nbytes // unit) * unit


def _written(nbytes: int) -> str:
    unit, name = _unit(nbytes)
    return f"{nbytes // unit}{name}" if nbytes % unit == 0 else f"{nbytes}B"
