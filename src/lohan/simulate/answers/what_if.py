"""What-ifs: the same request with one thing changed, planned and simulated again.

Owns the list of changes a user can really make and their wording. Factors compare tokens per
second, so a larger batch is judged fairly.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lohan.errors import ConfigError
from lohan.plan.limits import Question
from lohan.simulate.choose import Judge, JudgedPlan
from lohan.simulate.result import SimulatedStep
from lohan.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change and what it would do."""

    change: str
    option: str
    """What to write to plan it."""
    step: SimulatedStep | None
    """None if it would not fit."""
    factor: float | None
    """Tokens per second over those of the plan as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    change: str
    option: str
    apply: Callable[[Question], Question]
    """Raises ConfigError where there is no such machine or workload."""
    is_more: bool = True
    """The plan as asked can still be run, so that what is found is no worse."""


def _with_ssds(count: int) -> Callable[[Question], Question]:
    return lambda asked: replace(asked, machine=asked.machine.with_ssds(count))


def _changes(question: Question) -> Iterator[_Change]:
    machine, workload = question.machine, question.workload
    num_ssds = len(machine.ssds)
    for count, words in ((num_ssds + 1, "one more drive"), (2 * num_ssds, "twice the drives")):
        if count == 2 and words == "twice the drives":
            continue  # The same as one more.
        yield _Change(
            change=f"{words} ({num_ssds} -> {count})",
            option=f"--ssds {count}",
            apply=_with_ssds(count),
        )
    ram_bytes = 2 * machine.ram_bytes
    yield _Change(
        change=f"twice the RAM ({format_bytes(machine.ram_bytes)} -> {format_bytes(ram_bytes)})",
        option=f"--ram {ram_bytes >> 20}MiB"
        if ram_bytes % 2**30
        else f"--ram {ram_bytes >> 30}GiB",
        apply=lambda asked: replace(asked, machine=machine.with_ram(ram_bytes)),
    )
    batch = 2 * workload.batch
    yield _Change(
        change=f"twice the batch ({workload.batch} -> {batch})",
        option=f"--batch {batch}",
        apply=lambda asked: replace(asked, workload=replace(workload, batch=batch)),
        is_more=False,
    )
    if workload.clips_gradients:
        yield _Change(
            change="no gradient clipping",
            option="--no-clip",
            apply=lambda asked: replace(asked, workload=replace(workload, clips_gradients=False)),
        )


def what_ifs(question: Question, taken: JudgedPlan, judge: Judge) -> list[WhatIf]:
    """Every change worth trying, the most useful first; those that do not fit come last.

    Args:
        question: what is asked for.
        taken: its plan and simulated step.
        judge: what it knows already is not worked out again.
    """
    now_per_second = taken.step.tokens_per_second
    found = []
    for change in _changes(question):
        try:
            asked = change.apply(question)
        except ConfigError:
            continue  # Nobody has twice of what is at its limit.
        # What is planned now is a candidate with more of anything.
        changed = judge.changed(asked, taken if change.is_more else None)
        step = None if changed is None else changed.step
        factor = None if step is None else step.tokens_per_second / now_per_second
        if not change.is_more and factor is not None and factor < 1:
            continue  # A batch that is no help is nothing to try.
        found.append(WhatIf(change=change.change, option=change.option, step=step, factor=factor))
    return sorted(found, key=lambda one: -(one.factor or 0.0))
