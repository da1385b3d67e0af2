"""Settings of tests in which things go wrong."""

import signal
from collections.abc import Iterator

import pytest
import torch

from support.remembered_traces import remember_traces


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """A shell ignores Ctrl-C for what it starts in the background, tests and their children too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _remembered_traces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.config.getoption("--long"):
        remember_traces(monkeypatch)
