"""What an examination finds: a fact, and what to do about it where something is wrong.

Owns these records and when a machine counts as ready. Filled in by `checks`.
"""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    FINE = "fine"
    NOTE = "note"
    """Training works; something is slower or less safe than it could be."""
    PROBLEM = "problem"
    """Training does not work, or not as it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact. A note or a problem says what to do."""

    name: str
    found: str
    level: Level = Level.FINE
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All that was looked at, in order."""

    findings: tuple[Finding, ...]
    directories: tuple[str, ...]
    """As the user named them; a report does not."""

    @property
    def is_ready(self) -> bool:
        """Whether nothing is in the way of training."""
        return not any(one.level is Level.PROBLEM for one in self.findings)
