"""What an examination finds, and as a block of text to paste into a bug report.

Owns the records (a fact, and what to do about it where something is wrong), when a machine counts
as ready, and what is taken out of a report: directories, and whatever else names a place in
someone's files. Names of machines and users are not among the findings to begin with.
"""

import os
import re
from dataclasses import dataclass
from enum import StrEnum

# A path: a slash and more, not inside a word or another path. Devices are hardware, and stay.
# What follows one that was replaced belongs to it.
_PATH = re.compile(r"(?:(?<![\w/.~<-])~?|<path>)/(?!dev/)[^\s,;:'\"()]+")


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


def report_text(examination: Examination) -> str:
    """The findings as plain text."""
    verdict = "ready" if examination.is_ready else "not ready"
    lines = [f"lohan doctor: {verdict}"]
    for finding in examination.findings:
        mark = "" if finding.level is Level.FINE else f" [{finding.level.value}]"
        found = without_paths(finding.found, examination.directories)
        name = without_paths(finding.name, examination.directories)
        lines.append(f"{name}: {found}{mark}")
    return "\n".join(lines)


def without_paths(text: str, directories: tuple[str, ...] = ()) -> str:
    """The text with paths replaced, the directories given by their number."""
    known = [("<path>", os.path.expanduser("~"))]
    for number, directory in enumerate(directories, start=1):
        spellings = {directory, os.path.abspath(directory), os.path.realpath(directory)}
        known += [(f"<ssd {number}>", spelling) for spelling in spellings]
    # Longest first: one may be inside another. Whole words only: a directory may be called "s".
    for name, path in sorted(known, key=lambda pair: -len(pair[1])):
        if path.strip("./~"):
            text = re.sub(rf"(?<![\w/.-]){re.escape(path)}(?![\w-])", name, text)
    return _PATH.sub("<path>", text)
