"""Policies: each makes a Plan from a machine, a model shape and a workload.

Owns what a policy is, and the project's own one, `lohan+`. Policies of the published systems are in
`lohan.paper`; whoever takes a policy takes theirs too, without knowing their names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from lohan.errors import ConfigError
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.plan import Plan
from lohan.plan.policies.ours import OURS, plan_ours
from lohan.plan.system import System
from lohan.plan.workload import Workload

PlanFunction = Callable[[Machine, ModelShape, Workload], Plan]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SystemPolicy:
    """How one system plans; what it stores is known before it has planned."""

    system: System
    plan: PlanFunction

    @property
    def name(self) -> str:
        """The system's."""
        return self.system.name


Policy = PlanFunction | SystemPolicy

OUR_POLICY = SystemPolicy(system=OURS, plan=plan_ours)


def make_plan(
    policy: str | Policy, machine: Machine, shape: ModelShape, workload: Workload
) -> Plan:
    """The plan of a policy; whether it fits is in its ledger.

    Raises:
        ConfigError: if there is no such policy, or the batch does not divide over the GPUs.
    """
    if callable(policy):
        return policy(machine, shape, workload)
    return system_policy(policy).plan(machine, shape, workload)


def system_policy(policy: str | SystemPolicy) -> SystemPolicy:
    """The policy itself; of names only the project's own is known here.

    Raises:
        ConfigError: it is another name.
    """
    if isinstance(policy, SystemPolicy):
        return policy
    if policy != OUR_POLICY.name:
        raise ConfigError(
            f"there is no policy {policy!r}",
            why=f"by name only {OUR_POLICY.name} is known here",
            remedy=f"use {OUR_POLICY.name!r}, or lohan.paper.policy_named(...) for a published "
            "system's",
        )
    return OUR_POLICY
