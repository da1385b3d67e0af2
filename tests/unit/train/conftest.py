"""Trainer tests run on the engine's contract in plain PyTorch, offline and on one thread."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet_and_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Tiny tensors: a second thread only waits for the first.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
