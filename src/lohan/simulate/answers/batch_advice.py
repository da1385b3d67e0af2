"""Which batch to take: the same work with twice the sequences a step, and twice again.

Owns when a larger batch is worth saying. Weights and states move once a step whatever its batch, so
a larger one is faster and wears less until compute is the limit. What it does to learning is the
user's to judge: nothing is changed, only said.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lohan.errors import ConfigError
from lohan.plan.limits import Question
from lohan.simulate.choose import Judge
from lohan.simulate.result import SimulatedStep

Simulate = Callable[[Question], SimulatedStep | None]

_MOST_DOUBLINGS = 6
_GOOD_ENOUGH = 0.9
"""Of the best tokens per second found, the smallest batch with this share is what is advised."""
FASTER = 1.3
WEARS_LESS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """One batch and what it costs, against the one asked for."""

    batch: int
    step: SimulatedStep
    faster: float
    """Tokens per second over those of the batch asked for."""
    wear: float
    """Bytes written per token over those of the batch asked for; 1 where neither writes."""

    @property
    def is_worth_saying(self) -> bool:
        """Much faster, or half the wear."""
        return self.faster >= FASTER or self.wear <= WEARS_LESS


def batch_choices(question: Question, now: SimulatedStep, simulate: Simulate) -> list[BatchChoice]:
    """The batch asked for, and larger ones up to where more brings little.

    Args:
        question: what is asked for.
        now: its simulated step.
        simulate: gives a step for a changed question, None if it does not fit.
    """
    found = [BatchChoice(batch=question.workload.batch, step=now, faster=1.0, wear=1.0)]
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        try:
            step = simulate(_times(question, 2**doubling))
        except ConfigError:
            break
        if step is None:
            break
        batch = question.workload.batch * 2**doubling
        found.append(_compared(batch, step, now))
        gain = found[-1].faster / found[-2].faster
        less_wear = found[-2].wear - found[-1].wear
        if gain < 1 / _GOOD_ENOUGH and less_wear < 1 - _GOOD_ENOUGH:
            break
    return found


def advised(choices: list[BatchChoice]) -> BatchChoice:
    """The smallest batch that is nearly as fast as the fastest; at equal speed, the smallest that
    wears half as much, if one does."""
    best = max(choice.faster for choice in choices)
    fast = next(choice for choice in choices if choice.faster >= _GOOD_ENOUGH * best)
    lean = [choice for choice in choices if choice.wear <= WEARS_LESS]
    return lean[0] if lean and fast is choices[0] else fast


def _compared(batch: int, step: SimulatedStep, now: SimulatedStep) -> BatchChoice:
    before = now.written_bytes / now.num_tokens
    after = step.written_bytes / step.num_tokens
    return BatchChoice(
        batch=batch,
        step=step,
        faster=step.tokens_per_second / now.tokens_per_second,
        wear=after / before if before else 1.0,
    )


def _times(question: Question, factor: int) -> Question:
    workload = question.workload
    parts = workload.num_micro_batches
    return replace(
        question,
        workload=replace(
            workload,
            batch=factor * workload.batch,
            num_micro_batches=None if parts is None else factor * parts,
        ),
    )


def simulated_by(judge: Judge) -> Simulate:
    """The step of a changed question as a judge has it."""

    def simulate(question: Question) -> SimulatedStep | None:
        found = judge.changed(question)
        return found.step if found else None

    return simulate
