"""What fits: the largest batch and model, the least memory or drives, and for a plan that does not
fit the nearest ones that do, one change at a time.

Searches over plans by their ledgers alone; nothing is simulated. Every answer was planned and
found to fit; between the answer and the next larger one tried, finer steps are not looked at. A
change that alone does not help is not offered; more memory counts as one change, however many tiers
are short.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lohan.errors import ConfigError
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.policies import OUR_POLICY, Policy, SystemPolicy, make_plan
from lohan.plan.workload import Workload
from lohan.units import GIB, format_bytes, format_count
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestFit:
    """One change after which the plan fits."""

    change: str
    """In words, such as `a batch of 24`."""
    option: str
    """What to write, such as `--batch 24`."""


def nearest_fits(
    question: Question,
    shortages: Iterable[Tier],
    shapes: Iterable[ModelShape],
    policies: Iterable[SystemPolicy],
) -> list[NearestFit]:
    """Changes that make it fit, the cheapest first; of the other policies the first that does."""
    short = set(shortages)
    return [
        *_chunked_loss(question),
        *_smaller_batch(question),
        *more_memory(question, short),
        *_other_policy(question, policies),
        *_smaller_model(question, shapes),
    ]


def _chunked_loss(question: Question) -> Iterator[NearestFit]:
    if question.policy is not OUR_POLICY or question.workload.should_chunk_loss:
        return
    if question.fits(workload=replace(question.workload, should_chunk_loss=True)):
        yield NearestFit(change="the loss in chunks", option="--chunked-loss")


def _smaller_batch(question: Question) -> Iterator[NearestFit]:
    batch = largest_batch(question)
    if batch is not None and batch < question.workload.batch:
        yield NearestFit(change=f"a batch of {batch}", option=f"--batch {batch}")


def more_memory(question: Question, short: Collection[Tier]) -> Iterator[NearestFit]:
    """As much more of the short tiers as it takes; nothing if that is never enough."""
    machine = least_machine(question, sorted(short))
    if machine is None:
        return
    words, options = [], []
    if Tier.GPU in short:
        words.append(f"GPUs of {format_bytes(machine.gpu.memory_bytes)}")
        options.append(f"--gpu {machine.gpu.memory_bytes // GIB}GiB")
    if Tier.RAM in short:
        words.append(f"{format_bytes(machine.ram_bytes)} of RAM")
        options.append(f"--ram {machine.ram_bytes // GIB}GiB")
    if Tier.SSD in short:
        words.append(f"{len(machine.ssds)} drives")
        options.append(f"--ssds {len(machine.ssds)}")
    yield NearestFit(change=" and ".join(words), option=" ".join(options))


def _other_policy(question: Question, policies: Iterable[SystemPolicy]) -> Iterator[NearestFit]:
    for policy in policies:
        if policy == question.policy:
            continue
        workload = question.workload
        if policy is not OUR_POLICY:
            # Only this project's policy clips.
            workload = replace(workload, clips_gradients=False)
        if question.fits(policy=policy, workload=workload):
            yield NearestFit(change=f"the policy {policy.name}", option=f"--policy {policy.name}")
            return


def _smaller_model(question: Question, shapes: Iterable[ModelShape]) -> Iterator[NearestFit]:
    smaller = [s for s in shapes if s.num_parameters < question.shape.num_parameters]
    shape = largest_model(question, smaller)
    if shape is not None:
        yield NearestFit(
            change=f"the model {shape.name} ({format_count(shape.num_parameters)} parameters)",
            option=shape.name,
        )
