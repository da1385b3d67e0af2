"""How much a run may write to its SSDs, and which of several plans keeps to it.

Owns the sum of what a run writes (first states, steps, seals), taking the fastest plan within a
limit, and the refusal with the numbers. Policies make the plans, for drives on which writing is
dearer, so that they swap less: asked by `plan_run` for a run, and here for `lohan plan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan.errors import DoesNotFit
from lohan.fields import LEAST_RATE
from lohan.hardware.machine import Machine
from lohan.plan.limits import Question
from lohan.plan.plan import Plan
from lohan.plan.pools import trained_parameters
from lohan.simulate.choose import Judge
from lohan.simulate.quick import quick_step
from lohan.simulate.result import SimulatedStep
from lohan.units import format_bytes_decimal
from lohan.vocabulary import BlockId, TensorKind, Tier

WRITE_PRICES = (1.0, 4.0, 64.0)
"""How much dearer writes are in the plans compared where writing is limited. At the last price a
policy writes only what it cannot do without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLimit:
    """The most a whole run may write to its SSDs, and how long the run is."""

    budget_bytes: int
    num_steps: int
    num_seals: int = 1
    spent_bytes: int = 0
    """Written before the first state: to measure the drives."""

    def run_bytes(self, plan: Plan, step_bytes: int) -> int:
        """What the whole run writes if its steps write so much."""
        return self.spent_bytes + written_by_run(
            plan, step_bytes, num_steps=self.num_steps, num_seals=self.num_seals
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan, the machine it is for, and its step as simulated on it."""

    plan: Plan
    machine: Machine
    step: SimulatedStep


def with_write_price(machine: Machine, price: float) -> Machine:
    """The machine with drives that write so much slower, as far as drives may be slow."""
    if price == 1.0:
        return machine
    ssds = tuple(
        replace(ssd, write_bytes_per_second=max(ssd.write_bytes_per_second / price, LEAST_RATE))
        for ssd in machine.ssds
    )
    return replace(machine, ssds=ssds)


def written_by_run(plan: Plan, step_bytes: int, *, num_steps: int, num_seals: int) -> int:
    """Bytes of the first states, of all steps, and of all seals after the first."""
    state, shape = plan.system.state, plan.shape
    first_bytes = state.weights_bytes * sum(block.num_parameters for block in shape.blocks)
    first_bytes += (state.master_bytes + state.moments_bytes) * sum(trained_parameters(shape))
    return first_bytes + num_steps * step_bytes + num_seals * written_by_seal(plan)


def written_by_seal(plan: Plan) -> int:
    """Bytes a seal writes beside updates that are due: what lives in RAM, as far as it changes."""
    state = plan.system.state
    sizes = {
        TensorKind.P16: state.weights_bytes,
        TensorKind.P32: state.master_bytes,
        TensorKind.OS32: state.moments_bytes,
    }
    return sum(
        nbytes * count
        for number, count in enumerate(trained_parameters(plan.shape))
        for kind, nbytes in sizes.items()
        if plan.home_of(BlockId(number), kind) is Tier.RAM
    )


def deferred_share(plan: Plan) -> float:
    """Share of the updates of a step that are written after it has ended."""
    trained = trained_parameters(plan.shape)
    late = sum(n for n, block in zip(trained, plan.blocks, strict=True) if block.defers_update)
    return late / max(1, sum(trained))


def planned_within(question: Question, allowed: WriteLimit, judge: Judge) -> Candidate | None:
    """The plan of a question that a run with such a limit takes; None if none fits in memory.

    Raises:
        DoesNotFit: as `fastest_within`.
    """
    machine, found = question.machine, []
    for price in WRITE_PRICES:
        taken = judge.best(replace(question, machine=with_write_price(machine, price)))
        if taken is not None:
            step = taken.step if price == 1.0 else quick_step(taken.plan, machine)
            found.append(Candidate(plan=taken.plan, machine=machine, step=step))
    return fastest_within(found, allowed, is_binding=True) if found else None


def fastest_within(
    found: Sequence[Candidate], allowed: WriteLimit, *, is_binding: bool
) -> Candidate:
    """The fastest candidate within a limit; the one that writes least if it does not bind.

    Raises:
        DoesNotFit: all of them write more, and the limit binds.
    """
    totals = [allowed.run_bytes(one.plan, one.step.written_bytes) for one in found]
    within = [
        one for one, nbytes in zip(found, totals, strict=True) if nbytes <= allowed.budget_bytes
    ]
    if within:
        return min(within, key=lambda one: one.step.step_seconds)
    least_bytes, least = min(zip(totals, found, strict=True), key=lambda pair: pair[0])
    if is_binding:
        raise _refusal(least, least_bytes, allowed)
    return least


def _refusal(least: Candidate, least_bytes: int, allowed: WriteLimit) -> DoesNotFit:
    step_bytes = least.step.written_bytes
    others = least_bytes - allowed.num_steps * step_bytes
    num_fitting = max(0, allowed.budget_bytes - others) // max(1, step_bytes)
    shorter = (
        f"{num_fitting:,} steps fit (max_steps); more RAM, more gradient accumulation in fewer "
        "steps, or fewer seals (save_steps) write less"
        if num_fitting
        else "allow more RAM, so that less is written"
    )
    return DoesNotFit(
        f"the run would write {format_bytes_decimal(least_bytes)} to its SSDs, "
        f"{format_bytes_decimal(allowed.budget_bytes)} are allowed (write_budget)",
        why=f"{allowed.num_steps:,} steps write {format_bytes_decimal(step_bytes)} each by the "
        f"plan that writes least, first states and {allowed.num_seals:,} seals "
        f"{format_bytes_decimal(others)}",
        remedy=f"{shorter}; or raise offload.write_budget",
    )
