"""Models of these tests need not be traced again and again."""

import pytest

from support.remembered_traces import remember_traces


@pytest.fixture(autouse=True)
def _remembered_traces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.config.getoption("--long"):
        remember_traces(monkeypatch)
