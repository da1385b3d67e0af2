"""The nearest things that do fit, for a plan that does not: one change at a time.

Owns the list of changes worth offering. Each one was planned and fits; a change that alone does
not help is left out. More memory counts as one change, however many tiers are short.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from lohan.model.shape import ModelShape
from lohan.plan.limits import (
    Question,
    largest_batch,
    largest_model,
    least_machine,
)
from lohan.plan.policies import OUR_POLICY, SystemPolicy
from lohan.units import GIB, format_bytes, format_count
from lohan.vocabulary import Tier


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
        *_smaller_batch(question),
        *more_memory(question, short),
        *_other_policy(question, policies),
        *_smaller_model(question, shapes),
    ]


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
