"""Budgets of GPU memory from the least upward: what is accepted runs, within the budget."""

import importlib
from pathlib import Path

import pytest

from lohan.errors import DoesNotFit
from lohan.units import parse_bytes
from support.engine_runs import MIB, EngineCase, attach, batches_of, build, optimizer_for


def peak_bytes(case: EngineCase, directory: Path) -> int:
    model, steps = build(case), batches_of(case)
    optimizer = optimizer_for(case, model)
    with attach(case, model, optimizer, directory, largest_step=steps[0]) as engine:
        for batches in steps:
            engine.step(batches)
        peak = engine.device.peak_bytes
        engine.close(should_delete=True)
    return peak


def case_with(model: str, num_micro_batches: int, gpu_bytes: int) -> EngineCase:
    return EngineCase(
        model=model,
        num_micro_batches=num_micro_batches,
        gpu_bytes=gpu_bytes,
        ram_bytes=16 * MIB,
        device="emulated",
        num_steps=2,
    )


def least_gpu_bytes(model: str, num_micro_batches: int, directory: Path) -> int:
    with pytest.raises(DoesNotFit) as refused:
        peak_bytes(case_with(model, num_micro_batches, 1), directory)
    return parse_bytes(refused.value.remedy.partition('gpu="')[2].partition('"')[0])


def check(model: str, num_micro_batches: int, times: list[float], directory: Path) -> None:
    least = least_gpu_bytes(model, num_micro_batches, directory)
    for factor in times:
        budget = int(least * factor)
        assert peak_bytes(case_with(model, num_micro_batches, budget), directory) <= budget


@pytest.mark.parametrize("model", ["llama", "gpt2", "t5"])
def test_the_least_gpu_budget_holds_every_step(model: str, tmp_path: Path) -> None:
    check(model, 1, [1.0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "num_micro_batches"),
    [
        ("llama", 4),
        ("gpt2", 1),
        ("gpt2", 4),
        ("t5", 1),
        pytest.param("llama", 1, marks=pytest.mark.long),
        pytest.param("t5", 4, marks=pytest.mark.long),
    ],
)
def test_every_gpu_budget_that_is_accepted_holds_every_step(
    model: str, num_micro_batches: int, tmp_path: Path
) -> None:
    check(model, num_micro_batches, [1.0, 1.15], tmp_path)


@pytest.mark.parametrize(
    ("num_micro_batches", "budget"),
    [(1, 20 * MIB), pytest.param(4, 48 * MIB, marks=pytest.mark.slow)],
)
def test_a_step_holds_what_its_plan_sets_aside_and_no_more(
    num_micro_batches: int, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model large enough that single numbers do not count; see `benchmarks/device_memory.py`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    measure = importlib.import_module("device_memory").measure
    row, lines = measure("llama", (num_micro_batches, 2, 128), budget, str(tmp_path))
    assert 0.6 < row["measured_over_planned"] <= 1.0, lines
