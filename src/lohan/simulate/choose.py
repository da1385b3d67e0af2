"""The plan that is taken: the few best of a policy's search, judged by their simulated steps.

The estimate of `plan.cost` guides a search but does not see how lanes wait for each other, so it
may rank two plans wrongly. Plans for lesser machines are candidates on the machine as it is: what
is found for less is found for more. At equal speed the plan that writes least is taken. Called
where a plan is run or its step is told; limits ask whether anything fits and need no judge.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.block_costs import least_seconds, planned_load, traffic_of
from lohan.plan.cost import OVERLAP_LOSS
from lohan.plan.limits import Question
from lohan.plan.plan import Plan
from lohan.plan.policies import Policy, make_plan
from lohan.plan.policies.lesser import lesser_plans
from lohan.plan.workload import Workload
from lohan.simulate.quick import quick_step
from lohan.simulate.result import SimulatedStep

EQUALLY_FAST = 1e-3
"""Steps that differ by less than this share are equally fast: what is written decides then."""


class Judged(Protocol):
    """A plan and its simulated step."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def step(self) -> SimulatedStep:
        """The step."""


_Judged = TypeVar("_Judged", bound=Judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPlan:
    """A plan that fits and its simulated step."""

    plan: Plan
    step: SimulatedStep


def best_of(found: Sequence[_Judged]) -> _Judged:
    """The fastest; of those about as fast, the one that writes least."""
    limit = (1 + EQUALLY_FAST) * min(one.step.step_seconds for one in found)
    return min(
        (one for one in found if one.step.step_seconds <= limit),
        key=lambda one: (one.step.written_bytes, one.step.step_seconds),
    )


def best_plan(
    policy: str | Policy, machine: Machine, shape: ModelShape, workload: Workload
) -> Plan:
    """The plan of a policy that is run, fitting or not: ask its ledger.

    Raises:
        ConfigError: as `make_plan` does.
    """
    question = Question(policy=policy, machine=machine, shape=shape, workload=workload)
    found = Judge().best(question)
    return found.plan if found else make_plan(policy, machine, shape, workload)


class Judge:
    """Plans and steps of questions about one model, each worked out once.

    `is_thorough`: whether changes of a question are searched like the question itself; a step of a
    large model takes a fifth of a second to simulate, and a user at a terminal waits.
    """

    def __init__(self, *, is_thorough: bool = True) -> None:
        self._is_thorough = is_thorough
        self._known: dict[Hashable, JudgedPlan | None] = {}
        self._plans: dict[Hashable, Plan] = {}
        self._steps: dict[Hashable, JudgedPlan] = {}

    def best(self, question: Question) -> JudgedPlan | None:
        """The plan that is taken and its step; None if none fits."""
        return self._searched(question, is_thorough=True)

    def changed(self, question: Question, than: JudgedPlan | None = None) -> JudgedPlan | None:
        """The plan and step of a question with something changed; without a thorough search those
        of the estimate, which may be a little slower than what is taken in the end.

        Args:
            question: what is asked for.
            than: of a lesser question, so that it can be run here too: taken where it is faster.
        """
        found = self._searched(question, is_thorough=self._is_thorough)
        if than is None or found is None or not found.plan.system.uses_residency:
            return found
        if found.step.step_seconds <= than.step.step_seconds:
            return found
        known = self._judged(fitted(than.plan, found.plan), question.machine)
        return min(found, known, key=lambda one: one.step.step_seconds)

    def _searched(self, question: Question, *, is_thorough: bool) -> JudgedPlan | None:
        machine, workload = question.machine, question.workload
        key = (question.policy, question.shape.name, machine, workload, is_thorough)
        if key not in self._known:
            own = self._planned(question, machine, workload)
            judged = [self._judged(own, machine)] if own.ledger.fits else []
            if is_thorough and own.system.uses_residency:
                plan_for = functools.partial(self._planned, question)
                judged = candidates(own, machine, plan_for, lambda one: self._judged(one, machine))
            self._known[key] = best_of(judged) if judged else None
        return self._known[key]

    def _planned(self, question: Question, machine: Machine, workload: Workload) -> Plan:
        key = (question.policy, question.shape.name, machine, workload)
        if key not in self._plans:
            self._plans[key] = make_plan(question.policy, machine, question.shape, workload)
        return self._plans[key]

    def _judged(self, plan: Plan, machine: Machine) -> JudgedPlan:
        # What is simulated does not depend on how much RAM is left over.
        key = (_decisions(plan, plan.blocks), plan.workload, machine.with_ram(1))
        if key not in self._steps:
            self._steps[key] = JudgedPlan(plan=plan, step=quick_step(plan, machine))
        return replace(self._steps[key], plan=plan)


def candidates(
    own: Plan,
    machine: Machine,
    plan_for: Callable[[Machine, Workload], Plan | None],
    judge: Callable[[Plan], _Judged],
) -> list[_Judged]:
    """The plan of a request if it fits, and those for less that may be better, each judged."""
    judged: dict[Hashable, _Judged] = {}
    if own.ledger.fits:
        judged[_outline(own)] = judge(own)

    def may_help(plan: Plan) -> bool:
        plan = fitted(plan, own)
        if not plan.ledger.fits or not judged or _outline(plan) in judged:
            return plan.ledger.fits
        best = min(judged.values(), key=lambda one: one.step.step_seconds)
        if least_seconds(plan, machine) > (1 + EQUALLY_FAST) * best.step.step_seconds:
            return False
        # The estimate may err by what it makes of imperfect overlap, and not by more.
        known = planned_load(best.plan, machine).estimated_seconds
        return planned_load(plan, machine).estimated_seconds <= (1 + OVERLAP_LOSS) * known

    for plan in lesser_plans(machine, own.workload, plan_for, may_help):
        if _outline(plan) not in judged:
            judged[_outline(plan)] = judge(fitted(plan, own))
    return [*judged.values()]


def fitted(plan: Plan, own: Plan) -> Plan:
    """A plan for less as one of the request that another plan is for."""
    ledger = replace(plan.ledger, budgets=own.ledger.budgets)
    return replace(plan, workload=own.workload, ledger=ledger)


def _decisions(plan: Plan, of_blocks: Hashable) -> Hashable:
    buffers = plan.num_update_parts, plan.gradient_slots
    return of_blocks, plan.system, plan.num_micro_batches, buffers


def _outline(plan: Plan) -> Hashable:
    """The same for plans that differ in which of their blocks do what, and in nothing else."""
    return _decisions(plan, traffic_of(plan))
