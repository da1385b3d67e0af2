"""The other systems by name, as `systems.toml` describes them.

Owns how that file is read, which holds the properties and says where each comes from. What they
plan is in `published` and `later`.
"""

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from msgspec import to_builtins

from lohan.fields import read_json
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
