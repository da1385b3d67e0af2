"""What tests of equal bits share."""

from collections.abc import Iterator

import pytest
import torch

from support.block_backwards import BlockBackwards, count_backwards
from support.remembered_traces import remember_traces


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Enough for tiny tensors: results do not depend on it, and the tests run beside others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _remembered_traces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.config.getoption("--long"):
        remember_traces(monkeypatch)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> BlockBackwards:
    """How blocks went backward: through a kept graph, or run again."""
    return count_backwards(monkeypatch)
