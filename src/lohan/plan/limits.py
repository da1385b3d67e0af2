"""What fits: the largest batch, the largest model, the least RAM, GPU memory or drives.

Searches over plans by their ledgers alone; nothing is simulated. Every answer was planned and
found to fit; between the answer and the next larger one tried, finer steps are not looked at.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lohan.errors import ConfigError
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.policies import Policy, make_plan
from lohan.plan.workload import Workload
from lohan.units import GIB
from lohan.vocabulary import Tier

MAX_BATCH_PER_GPU = 65_536
MAX_RAM_GIB = 64 * 1024
MAX_GPU_GIB = 1024
MAX_SSDS = 64
_FINEST_SHARE = 16
"""A batch is found to within a sixteenth of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A plan that is asked for: by what policy, where, with what batch."""

    policy: str | Policy
    machine: Machine
    shape: ModelShape
    workload: Workload

    def fits(self, **changes: Any) -> bool:
        """Whether it fits, with fields changed; what cannot be planned does not fit."""
        asked = replace(self, **changes)
        try:
            plan = make_plan(asked.policy, asked.machine, asked.shape, asked.workload)
        except ConfigError:
            return False
        return plan.ledger.fits


def largest_batch(question: Question) -> int | None:
    """The largest batch that fits, of all GPUs together; None if one sequence per GPU does not."""
    num_gpus = question.machine.num_gpus

    def fits(per_gpu: int) -> bool:
        return question.fits(workload=replace(question.workload, batch=per_gpu * num_gpus))

    # From what was asked, if that fits: each try is a whole plan.
    asked = question.workload.batch // num_gpus
    low = asked if asked and fits(asked) else 1
    if low == 1 and not fits(1):
        return None
    while low < MAX_BATCH_PER_GPU and fits(2 * low):
        low *= 2
    high = 2 * low
    while high - low > max(1, low // _FINEST_SHARE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * num_gpus


def largest_model(question: Question, shapes: Iterable[ModelShape]) -> ModelShape | None:
    """The model with most parameters that fits with the same batch; None if none does."""
    by_size = sorted(shapes, key=lambda shape: -shape.num_parameters)
    return next((shape for shape in by_size if question.fits(shape=shape)), None)


def least_machine(question: Question, short: Collection[Tier]) -> Machine | None:
    """The machine with just as much more of the short tiers as it takes; None if it never fits."""
    machine = question.machine
    for tier in short:
        machine = _MORE[tier].apply(machine, _MORE[tier].most)
    for tier in short:
        # One after another: what is not in RAM must be on SSD, so one amount decides the next.
        amount = _least(replace(question, machine=machine), _MORE[tier])
        if amount is None:
            return None
        machine = _MORE[tier].apply(machine, amount)
    return machine


@dataclass(frozen=True, slots=True, kw_only=True)
class _More:
    """How a machine gets more of one tier."""

    apply: Callable[[Machine, int], Machine]
    most: int


_MORE = {
    Tier.GPU: _More(
        apply=lambda machine, gib: machine.with_gpu_memory(gib * GIB), most=MAX_GPU_GIB
    ),
    Tier.RAM: _More(apply=lambda machine, gib: machine.with_ram(gib * GIB), most=MAX_RAM_GIB),
    Tier.SSD: _More(apply=lambda machine, count: machine.with_ssds(count), most=MAX_SSDS),
}


def _least(question: Question, more: _More) -> int | None:
    """The least amount of a tier with which it fits, by halving; None if the most does not."""

    def fits(amount: int) -> bool:
        return question.fits(machine=more.apply(question.machine, amount))

    low, high = 0, more.most
    if not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
