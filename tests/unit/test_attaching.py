"""The defaults of `lohan.attach`."""

import pathlib
from typing import Any

import pytest
import torch

import lohan
from lohan import attaching
from lohan.device import open_device
from lohan.errors import DoesNotFit
from support.small_machines import small_machine


def test_measuring_changes_no_random_numbers_and_touches_no_gpu_that_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(**_: Any) -> tuple[Any, str]:
        torch.rand(3)
        return small_machine(), ""

    def other_gpu(*_: Any) -> None:
        raise AssertionError("a GPU was asked that is not used")

    monkeypatch.setattr(attaching, "profile_machine", measure)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", other_gpu)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    with open_device("cpu") as device:
        found = attaching._machine(None, ["/nowhere"], device, None)
    assert found == small_machine()
    assert torch.equal(torch.rand(3), expected)


def test_a_ram_budget_above_all_memory_is_refused_and_the_device_is_told(
    tmp_path: pathlib.Path,
) -> None:
    told: list[str] = []
    model = torch.nn.Linear(2, 2)
    optimizer = lohan.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(DoesNotFit, match=r"RAM budget is 1.0 PiB"):
        lohan.attach(model, optimizer, ssd=tmp_path, ram="1PiB", device="cpu", progress=told.append)
    assert told == ["device cpu: 'cpu' was asked for"]
    assert list(tmp_path.iterdir()) == []
