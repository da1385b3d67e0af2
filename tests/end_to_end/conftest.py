"""Commands of this process need not make the same plans again and again."""

import pytest

from support.remembered_plans import remember_plans


@pytest.fixture(autouse=True)
def _remembered_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.config.getoption("--long"):
        remember_plans(monkeypatch)
