"""The plan that is taken: the few best of a policy's search, judged by their simulated steps.

The estimate of `plan.cost` guides a search but does not see how lanes wait for each other, so it
may rank two plans wrongly. Plans for lesser machines are candidates on the machine as it is: what
is found for less is found for more. At equal speed the plan that writes least is taken. Called
where a plan is run or its step is told; limits ask whether anything fits and need no judge.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.limits import Question
from lohan.plan.plan import Plan
from lohan.plan.plan_load import least_seconds, planned_load
from lohan.plan.policies import Policy, make_plan
from lohan.plan.policies.lesser import lesser_requests
from lohan.plan.workload import Workload
from lohan.simulate.quick import quick_step
from lohan.simulate.result import SimulatedStep

EQUALLY_FAST = 1e-3
"""Steps that differ by less than this share are equally fast: what is written decides then."""


class Judged(Protocol):
    """Something with a simulated step."""

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
        self._steps: dict[Hashable, JudgedPlan] = {}

    def best(self, question: Question) -> JudgedPlan | None:
        """The plan that is taken and its step; None if none fits."""
        return self._once(question, lesser_requests(question.machine, question.workload))

    def changed(self, question: Question, than: JudgedPlan | None = None) -> JudgedPlan | None:
        """The plan and step of a question with something changed; without a thorough search those
        of the estimate, which may be a little slower than what is taken in the end.

        Args:
            question: what is asked for.
            than: of a lesser question, so that it can be run here too: taken where it is faster.
        """
        found = self.best(question) if self._is_thorough else self._once(question, ())
        if than is None or found is None or not found.plan.system.uses_residency:
            return found
        if found.step.step_seconds <= than.step.step_seconds:
            return found
        known = self._judged(fitted(than.plan, found.plan), question.machine)
        return min(found, known, key=lambda one: one.step.step_seconds)

    def _once(
        self, question: Question, lesser: Iterable[tuple[Machine, Workload]]
    ) -> JudgedPlan | None:
        asked = (question.policy, question.shape.name, question.machine, question.workload)
        key = (*asked, lesser == ())
        if key not in self._known:
            self._known[key] = self._searched(question, lesser)
        return self._known[key]

    def _searched(
        self, question: Question, lesser: Iterable[tuple[Machine, Workload]]
    ) -> JudgedPlan | None:
        policy, shape = question.policy, question.shape
        own = make_plan(policy, question.machine, shape, question.workload)
        found = [own]
        if own.system.uses_residency:
            others = [make_plan(policy, machine, shape, workload) for machine, workload in lesser]
            found += [fitted(plan, own) for plan in others]
        unique = {_decisions(plan): plan for plan in reversed(found) if plan.ledger.fits}
        machine = question.machine
        # The most likely first: what cannot be faster than one of these need not be simulated.
        likely = sorted(
            unique.values(), key=lambda plan: planned_load(plan, machine).estimated_seconds
        )
        judged: list[JudgedPlan] = []
        for plan in likely:
            limit = (1 + EQUALLY_FAST) * min(
                (one.step.step_seconds for one in judged), default=math.inf
            )
            if least_seconds(plan, machine) <= limit:
                judged.append(self._judged(plan, machine))
        return best_of(judged) if judged else None

    def _judged(self, plan: Plan, machine: Machine) -> JudgedPlan:
        # What is simulated does not depend on how much RAM is left over.
        key = (_decisions(plan), plan.workload, machine.with_ram(1))
        if key not in self._steps:
            self._steps[key] = JudgedPlan(plan=plan, step=quick_step(plan, machine))
        return replace(self._steps[key], plan=plan)


def fitted(plan: Plan, own: Plan) -> Plan:
    """A plan for less as one of the request that another plan is for."""
    return replace(
        plan,
        workload=own.workload,
        ledger=replace(plan.ledger, budgets=own.ledger.budgets),
    )


def _decisions(plan: Plan) -> Hashable:
    return (
        plan.system,
        plan.num_micro_batches,
        plan.blocks,
        plan.num_update_parts,
        plan.gradient_slots,
    )
