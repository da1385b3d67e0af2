"""Policies by name: each makes a Plan from a machine, a model shape and a workload."""

from lohan.errors import ConfigError, nearest_names
from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan.plan import Plan
from lohan.plan.policies.ours import OURS, plan_ours
from lohan.plan.policies.published import plan_published
from lohan.plan.policies.systems import PUBLISHED_SYSTEMS
from lohan.plan.system import System
from lohan.plan.workload import Workload

POLICY_NAMES = (OURS.name, *PUBLISHED_SYSTEMS)


def make_plan(policy: str, machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
    """The plan of a policy; whether it fits is in its ledger.

    Raises:
        ConfigError: if there is no such policy, or the batch does not divide over the GPUs.
    """
    system = system_named(policy)
    if system is OURS:
        return plan_ours(machine, shape, workload)
    return plan_published(system, machine, shape, workload)


def system_named(policy: str) -> System:
    """The system a policy plans for.

    Raises:
        ConfigError: if there is no such policy.
    """
    if policy == OURS.name:
        return OURS
    if policy in PUBLISHED_SYSTEMS:
        return PUBLISHED_SYSTEMS[policy]
    raise ConfigError(
        f"there is no policy {policy!r}",
        why=f"the policies are {', '.join(POLICY_NAMES)}",
        remedy=nearest_names(policy, POLICY_NAMES),
    )
