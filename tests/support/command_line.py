"""Runs `lohan` in this process, as a user would see it."""

import json
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from lohan.cli import app


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def fields(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        found = json.loads(self.stdout)
        assert isinstance(found, dict)
        return found


def run_lohan(*words: object) -> Ran:
    """Run a command; an exception that is no exit is raised here."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return Ran(result.exit_code, result.stdout, result.stderr)
