"""What the engine puts into a seal beside the states, and finds there again.

Owns the names of its parts: the engine's counters, the model's buffers, and what the user gave.
Called by `attach` for the first seal of a run and by the engine for all others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lohan.store import Manifest

_COUNTERS, _BUFFERS, _USER = "lohan", "buffers", "user"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """The last resume point."""

    step: int
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, manifest: Manifest | None) -> "Sealed | None":
        """As a user sees a seal."""
        if manifest is None:
            return None
        return cls(step=manifest.step, metadata=manifest.metadata.get(_USER, {}))


def seal_metadata(
    *, counters: Mapping[str, Any] | None, buffers: Mapping[str, Any], user: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata of a seal; without counters for a run that begins."""
    found = {_BUFFERS: dict(buffers), _USER: dict(user)}
    return found if counters is None else {_COUNTERS: dict(counters), **found}


def sealed_counters(manifest: Manifest | None) -> Mapping[str, Any] | None:
    """Counters to go on from; None if the run begins."""
    found: Mapping[str, Any] | None = (
        manifest.metadata.get(_COUNTERS) if manifest is not None else None
    )
    return found


def sealed_buffers(manifest: Manifest | None) -> Mapping[str, Any]:
    """The model's buffers in a seal, in their sealed form; none in those of older releases."""
    found: Mapping[str, Any] = manifest.metadata.get(_BUFFERS, {}) if manifest is not None else {}
    return found
