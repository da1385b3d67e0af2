"""What limited a run and what would help most: one sentence, on the console and in the report.

Owns which changes are worth saying and the wording of the sentence. Factors compare two simulated
steps, that of the run's own request and that of a changed one, so they say nothing about how well
either is predicted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan.hardware.machine import Machine
from lohan.plan.limits import Question
from lohan.plan.plan import Plan
from lohan.plan.policies.our_memory import GPU_SHARE, RAM_SHARE
from lohan.simulate.answers.batch_advice import (
    FASTER,
    BatchChoice,
    advised,
    batch_choices,
    simulated_by,
)
from lohan.simulate.answers.what_if import what_ifs
from lohan.simulate.bottleneck import (
    GPU_WORDS,
    HOST_REMEDY,
    HOST_WORDS,
    PROCESSOR_WORDS,
    plain_limit,
)
from lohan.simulate.choose import Judge, JudgedPlan
from lohan.simulate.quick import quick_step
from lohan.simulate.result import SimulatedStep
from lohan.vocabulary import Tier

_WORTH_BUYING = 1.1
_MOST_SHOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change, and tokens per second with it over those without it, both simulated."""

    change: str
    factor: float


def question_of(plan: Plan, machine: Machine) -> Question:
    """The request behind a plan in use, on the machine as its budgets of memory leave it."""
    budgets = plan.ledger.budgets
    # A policy leaves these shares to the system: they are given back, to be left again.
    machine = machine.with_ram(max(1, math.ceil(budgets[Tier.RAM] / RAM_SHARE)))
    machine = machine.with_gpu_memory(max(1, math.ceil(budgets[Tier.GPU] / GPU_SHARE)))
    parts = plan.num_micro_batches
    return Question(
        policy=plan.policy,
        machine=machine,
        shape=plan.shape,
        workload=replace(plan.workload, num_micro_batches=parts),
    )


def advice_for(plan: Plan, machine: Machine) -> list[Advice]:
    """Changes that make a step clearly faster than the plan in use does, the best first.

    Raises:
        ConfigError: they cannot be planned.
    """
    question, taken, judge = _in_use(plan, machine)
    # The best of those that change the machine or a setting, and a larger batch for itself: what
    # that does to learning is the user's to judge.
    found = [
        Advice(change=one.change.partition(" (")[0], factor=one.factor)
        for one in what_ifs(question, taken, judge)
        if not one.option.startswith("--batch")
        if one.factor is not None and one.factor >= _WORTH_BUYING
    ][:1]
    batch = _larger_batch(question, taken.step, judge)
    if batch is not None and batch.faster >= FASTER:
        found.append(Advice(change=f"a batch of {batch.batch:,} rows", factor=batch.faster))
    return sorted(found, key=lambda one: -one.factor)


def larger_batch(plan: Plan, machine: Machine) -> BatchChoice | None:
    """The batch `advice_for` would take, if it is much faster or wears much less; None if not.

    Raises:
        ConfigError: it cannot be planned.
    """
    question, taken, judge = _in_use(plan, machine)
    return _larger_batch(question, taken.step, judge)


def _in_use(plan: Plan, machine: Machine) -> tuple[Question, JudgedPlan, Judge]:
    taken = JudgedPlan(plan=plan, step=quick_step(plan, machine))
    # As `lohan plan` does: a thorough search of every change took longer than a short run.
    return question_of(plan, machine), taken, Judge(is_thorough=False)


def _larger_batch(question: Question, now: SimulatedStep, judge: Judge) -> BatchChoice | None:
    choice = advised(batch_choices(question, now, simulated_by(judge)))
    return choice if choice.is_worth_saying else None


def limit_sentence(bottleneck: str, share: float, advice: Sequence[Advice] | None) -> str:
    """What limited a run and what would help.

    Args:
        bottleneck: without its shares.
        share: of the steps that were limited by it.
        advice: best first; None where nothing was worked out.
    """
    names = plain_limit(bottleneck)
    subject = names if names == bottleneck else f"{names}, which waited for each other,"
    said = f"{subject[0].upper()}{subject[1:]} limited this run (in {share:.0%} of its steps)"
    help_words = _help(names, advice)
    return f"{said}; {help_words}." if help_words else f"{said}."


def _help(names: str, advice: Sequence[Advice] | None) -> str:
    if names == HOST_WORDS:
        return HOST_REMEDY
    if names == PROCESSOR_WORDS:
        return "a GPU would help most"
    if advice:
        first, *others = advice[:_MOST_SHOWN]
        more = "".join(f", {one.change} {one.factor:.1f}x" for one in others)
        return f"{first.change} would make it {first.factor:.1f}x as fast{more} (simulated)"
    if advice is None:
        return ""
    if PROCESSOR_WORDS in names:
        return "a GPU would help most"
    if names == GPU_WORDS:
        return "a faster GPU would help most"
    return "neither more drives or RAM nor a larger batch would help much (simulated)"
