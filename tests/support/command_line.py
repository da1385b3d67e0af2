"""Runs `lohan` in this process, as a user would see it."""

import json
from dataclasses import dataclass
from typing import Any
from unittest import mock

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


def run_plan_without_advice(*words: object) -> Ran:
    """`lohan plan` as it plans and simulates, without what-ifs, other batches, limits and offers:
    for following what another answer said, where these would take most of the time."""
    asked_alone = mock.patch("lohan.simulate.answers.batch_advice._MOST_DOUBLINGS", 0)
    no_advice = mock.patch.multiple(
        "lohan.simulate.answers.answer",
        what_ifs=lambda *_: (),
        largest_batch=lambda *_: None,
        largest_model=lambda *_: None,
        nearest_fits=lambda *_: (),
    )
    with asked_alone, no_advice:
        return run_lohan("plan", *words)
