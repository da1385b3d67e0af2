"""The defaults of `lohan.attach`."""

import pathlib
from typing import Any

import pytest
import torch

import lohan
from lohan import attaching
from lohan.device import open_device
from lohan.engine.options import Options
from lohan.errors import ConfigError, DoesNotFit
from lohan.measure import profile_machine
from support.profiles import profile, quick_instruments
from support.small_machines import small_machine
from support.tiny_models import llama, tokens_of

SMALL_RAM = "3500KiB"
"""So little that states of a tiny model stay on SSD."""


def test_measuring_changes_no_random_numbers_and_touches_no_gpu_that_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = profile()

    def measure(**_: Any) -> tuple[Any, str]:
        torch.rand(3)
        return shown, ""

    def other_gpu(*_: Any) -> None:
        raise AssertionError("a GPU was asked that is not used")

    monkeypatch.setattr(attaching, "profile_machine", measure)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", other_gpu)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    with open_device("cpu") as device:
        found = attaching._this_machine(Options(ssd=["/nowhere"]), device)
    assert found.machine == shown.machine
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


def test_an_unknown_policy_is_refused_before_anything_is_opened_or_measured(
    tmp_path: pathlib.Path,
) -> None:
    told: list[str] = []
    model = torch.nn.Linear(2, 2)
    optimizer = lohan.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(ConfigError, match="no policy 'zero-infinty'") as caught:
        lohan.attach(
            model,
            optimizer,
            ssd=tmp_path,
            device="cpu",
            policy="zero-infinty",
            progress=told.append,
        )
    assert "zero-infinity" in caught.value.remedy
    assert told == []
    assert list(tmp_path.iterdir()) == []


def test_a_published_policy_by_name_runs_with_the_states_of_its_system(
    tmp_path: pathlib.Path,
) -> None:
    model = llama(0.0)
    tokens = tokens_of(0)
    batch = {"input_ids": tokens, "labels": tokens}
    with lohan.attach(
        model,
        lohan.AdamW(model.parameters(), lr=1e-3),
        ssd=tmp_path,
        ram="64MiB",
        device="cpu",
        machine=small_machine(),
        policy="zero-infinity",
        example=batch,
    ) as engine:
        engine.step([batch])
        assert engine.plan is not None
        assert engine.plan.policy == "zero-infinity"
        assert not engine.plan.system.state.needs_weights_to_update
        engine.close(should_delete=True)


def attached(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """An engine of a tiny model on a machine that is measured quickly, but really."""

    def quick(**given: Any) -> Any:
        given["instruments"] = quick_instruments()
        return profile_machine(**{**given, "seconds": 1e-3, "cache": root / "cache"})

    monkeypatch.setattr(attaching, "profile_machine", quick)
    (root / "ssd").mkdir(exist_ok=True)
    model = llama(0.0)
    tokens = tokens_of(0)
    return lohan.attach(
        model,
        lohan.AdamW(model.parameters(), lr=1e-3),
        ssd=root / "ssd",
        device="cpu",
        example={"input_ids": tokens, "labels": tokens},
        **options,
    )


def states_bytes(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """What attaching writes beside measuring."""
    with attached(root, monkeypatch, machine=small_machine()) as engine:
        written: int = engine.written_bytes
        engine.close(should_delete=True)
    return written


@pytest.mark.parametrize("has_batches", [False, True])
def test_drives_are_not_measured_where_everything_stays_in_ram(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, has_batches: bool
) -> None:
    tokens = tokens_of(0)
    step = [{"input_ids": tokens, "labels": tokens}] if has_batches else None
    with attached(tmp_path, monkeypatch, ram="1GiB", largest_step=step) as engine:
        assert engine.measuring_bytes == 0
        assert engine.written_bytes == states_bytes(tmp_path / "ssd", monkeypatch)
        assert "usual ones" in engine.rates_note
        engine.close(should_delete=True)


@pytest.mark.parametrize("has_batches", [False, True])
def test_drives_that_steps_use_are_measured_and_what_that_wrote_is_counted(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, has_batches: bool
) -> None:
    tokens = tokens_of(0)
    batch = {"input_ids": tokens, "labels": tokens}
    options = {"ram": SMALL_RAM, "largest_step": [batch] if has_batches else None}
    with attached(tmp_path, monkeypatch, **options) as engine:
        assert engine.measuring_bytes > 0
        beside = engine.written_bytes - engine.measuring_bytes
        assert beside == states_bytes(tmp_path / "ssd", monkeypatch)
        assert "burst" in engine.rates_note
        for _ in range(2):
            engine.step([batch])
        # From here on rates are those of the run's own writes.
        assert engine.rates_note == ""
        engine.close(should_delete=True)
    # The second time it is remembered.
    with attached(tmp_path, monkeypatch, **options) as engine:
        assert engine.measuring_bytes == 0
        engine.close(should_delete=True)


def test_a_machine_that_is_given_is_not_measured(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise AssertionError("the machine was measured")

    file = tmp_path / "machine.json"
    file.write_text(small_machine().to_json())
    for machine in (small_machine(), str(file), "workstation-4090"):
        with attached(tmp_path, monkeypatch, ram=SMALL_RAM, machine=machine) as engine:
            monkeypatch.setattr(attaching, "profile_machine", refuse)
            assert engine.measuring_bytes == 0
            assert engine.rates_note == ""
            assert engine.machine.gpu.is_processor
            engine.close(should_delete=True)
