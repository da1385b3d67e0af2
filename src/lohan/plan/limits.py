"""What fits: the largest batch, the largest model, the least RAM, GPU memory or drives.

Searches over plans by their ledgers alone; nothing is simulated. Every answer was planned and
found to fit; between the answer and the next larger one tried, finer steps are not looked at.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lohan.errors import ConfigError
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.policies import make_plan
from lohan.plan.workload import Workload
from lohan.units import GIB

MAX_BATCH_PER_GPU = 65_536
MAX_RAM_BYTES = 64 * 1024 * GIB
MAX_GPU_BYTES = 1024 * GIB
MAX_SSDS = 64
_FINEST_SHARE = 16
"""A batch is found to within a sixteenth of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A plan that is asked for: by what policy, where, with what batch."""

    policy: str
    machine: Machine
    shape: ModelShape
    workload: Workload

    def fits(
        self,
        *,
        policy: str | None = None,
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


def _with_batch(question: Question, batch: int) -> Workload:
    return Workload(
        batch=batch,
        sequence=question.workload.sequence,
        clips_gradients=question.workload.clips_gradients,
    )


def largest_batch(question: Question) -> int | None:
    """The largest batch that fits, of all GPUs together; None if one sequence per GPU does not."""
    num_gpus = question.machine.num_gpus

    def fits(per_gpu: int) -> bool:
        return question.fits(workload=_with_batch(question, per_gpu * num_gpus))

    if not fits(1):
        return None
    low = 1
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


def least_ram_bytes(question: Question) -> int | None:
    """The least RAM with which it fits, in whole GiB; None if RAM is not all that is short."""
    machine = question.machine
    least = _least(
        lambda gib: question.fits(machine=machine.with_ram(gib * GIB)), 1, MAX_RAM_BYTES // GIB
    )
    return None if least is None else least * GIB


def least_gpu_bytes(question: Question) -> int | None:
    """The least memory per GPU with which it fits, in whole GiB."""
    machine = question.machine
    least = _least(
        lambda gib: question.fits(machine=machine.with_gpu_memory(gib * GIB)),
        1,
        MAX_GPU_BYTES // GIB,
    )
    return None if least is None else least * GIB


def least_ssds(question: Question) -> int | None:
    """The least number of drives with which it fits."""
    return _least(
        lambda count: question.fits(machine=question.machine.with_ssds(count)), 1, MAX_SSDS
    )
