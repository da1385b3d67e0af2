"""All policies by name: the project's own and those of the published systems.

The one place that turns what a user writes into a policy. Called by the commands and by
`lohan.attach`; everything below takes the policy itself.
"""

from functools import partial

from lohan.errors import ConfigError, nearest_names
from lohan.paper.later import plan_later
from lohan.paper.published import plan_published
from lohan.paper.systems import LATER_SYSTEMS, PUBLISHED_SYSTEMS
from lohan.plan.policies import OUR_POLICY, SystemPolicy

POLICIES = {OUR_POLICY.name: OUR_POLICY} | {
    name: SystemPolicy(system=system, plan=partial(plan, system))
    for systems, plan in ((PUBLISHED_SYSTEMS, plan_published), (LATER_SYSTEMS, plan_later))
    for name, system in systems.items()
}
POLICY_NAMES = tuple(POLICIES)


def policy_named(name: str) -> SystemPolicy:
    """The policy of this name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"there is no policy {name!r}",
            why=f"the policies are {', '.join(POLICY_NAMES)}",
            remedy=nearest_names(name, POLICY_NAMES),
        )
    return POLICIES[name]
