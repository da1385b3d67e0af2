"""What fits: the largest batch, the largest model, the least RAM, GPU memory or drives.

Searches over plans by their ledgers alone; nothing is simulated. Every answer was planned and
found to fit; between the answer and the next larger one tried, finer steps are not looked at.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from lohan.errors import ConfigError
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.policies import Policy, make_plan
from lohan.plan.workload import Workload
from lohan.units import GIB
from lohan.vocabulary import Tier

MAX_BATCH_PER_GPU = 65_536
MAX_RAM_BYTES = 64 * 1024 * GIB
MAX_GPU_BYTES = 1024 * GIB
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

    def fits(
        self,
        *,
        policy: str | Policy | None = None,
        machine: Machine | None = None,
        shape: ModelShape | None = None,
        workload: Workload | None = None,
    ) -> bool:
        """Whether it fits, with something changed; what cannot be planned does not fit."""
        try:
            plan = make_plan(
                policy or self.policy,
                machine or self.machine,
                shape or self.shape,
                workload or self.workload,
            )
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


def _least(fits: Callable[[int], bool], first: int, last: int) -> int | None:
    """The least number from `first` on that fits, by halving; None if `last` does not."""
    if first > last or not fits(last):
        return None
    low, high = first - 1, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def least_machine(question: Question, short: Collection[Tier]) -> Machine | None:
    """The machine with just as much more of the short tiers as it takes; None if it never fits."""
    machine = question.machine
    for tier in short:
        machine = _MORE[tier].apply(machine, _MORE[tier].most)
    for tier in short:
        # One after another: what is not in RAM must be on SSD, so one amount decides the next.
        amount = _least_of(tier, replace(question, machine=machine))
        if amount is None:
            return None
        machine = _MORE[tier].apply(machine, amount // _MORE[tier].unit)
    return machine


@dataclass(frozen=True, slots=True, kw_only=True)
class _More:
    """How a machine gets more of one tier."""

    apply: Callable[[Machine, int], Machine]
    unit: int
    most: int


_MORE = {
    Tier.GPU: _More(
        apply=lambda machine, gib: machine.with_gpu_memory(gib * GIB),
        unit=GIB,
        most=MAX_GPU_BYTES // GIB,
    ),
    Tier.RAM: _More(
        apply=lambda machine, gib: machine.with_ram(gib * GIB),
        unit=GIB,
        most=MAX_RAM_BYTES // GIB,
    ),
    Tier.SSD: _More(apply=lambda machine, count: machine.with_ssds(count), unit=1, most=MAX_SSDS),
}


def _least_of(tier: Tier, question: Question) -> int | None:
    """The least bytes (of SSD: drives) of one tier with which it fits."""
    more = _MORE[tier]
    least = _least(
        lambda amount: question.fits(machine=more.apply(question.machine, amount)), 1, more.most
    )
    return None if least is None else least * more.unit
