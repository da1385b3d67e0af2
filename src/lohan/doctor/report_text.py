"""A block of text to paste into a bug report: what was found, without personal paths.

Owns what is taken out: directories, and whatever else names a place in someone's files. Names of
machines and users are not among the findings to begin with.
"""

import os
import re

from lohan.doctor.finding import Examination, Level

# A path: a slash and more, not inside a word or another path. Devices are hardware, and stay.
# What follows one that was replaced belongs to it.
_PATH = re.compile(r"(?:(?<![\w/.~<-])~?|<path>)/(?!dev/)[^\s,;:'\"()]+")


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
