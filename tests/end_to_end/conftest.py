"""Commands of this process need not make the same plans and traces again and again."""

import pytest

from support.remembered_plans import remember_plans
from support.remembered_traces import remember_traces


@pytest.fixture(autouse=True)
def _remembered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.config.getoption("--long"):
        remember_plans(monkeypatch)
        remember_traces(monkeypatch)
