"""All policies by name: the project's own and those of the other systems (`systems.toml`).

The one place that turns what a user writes into a policy, and that reads that file, which holds the
properties and says where each comes from. Called by the commands and by `lohan.attach`; everything
below takes the policy itself.
"""

import json
import tomllib
from collections.abc import Mapping
from functools import partial
from importlib import resources
from typing import Any

from msgspec import to_builtins

from lohan.errors import ConfigError, nearest_names
from lohan.fields import read_json
from lohan.paper.later import plan_later
from lohan.paper.published import plan_published
from lohan.plan.policies import OUR_POLICY, SystemPolicy
from lohan.plan.system import PLAIN_STATE, System


def _systems(described: Mapping[str, Mapping[str, Any]]) -> dict[str, System]:
    found = {}
    for name, own in described.items():
        like = described.get(own.get("like", ""), {})
        parts = {part: {**like.get(part, {}), **own.get(part, {})} for part in _PARTS}
        fields = {"state": to_builtins(PLAIN_STATE), **like, **own, **parts, "name": name}
        fields.pop("like", None)
        found[name] = read_json(json.dumps(fields), System, where=name)
    return found


_PARTS = ("rates", "footprint")
_KNOWN = tomllib.loads(
    (resources.files("lohan.paper") / "systems.toml").read_text(encoding="utf-8")
)
PUBLISHED_SYSTEMS = _systems(_KNOWN["published"])
"""The paper's own and those it was compared with."""
LATER_SYSTEMS = _systems(_KNOWN["later"])
"""What came after the paper."""

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
