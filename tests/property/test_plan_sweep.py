"""A small piece of the sweep that `benchmarks/plan_sweep.py` makes: more is never planned worse."""

import importlib.util
import pathlib
import sys
from types import ModuleType

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "plan_sweep.py"


@pytest.fixture(scope="module")
def plan_sweep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_sweep", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_sweep"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("model", "ram_gib", "num_ssds", "batch"),
    [
        ("gpt-13b", (32,), (4, 5), 32),
        ("gpt-13b", (512,), (1, 2), 128),
    ],
)
def test_more_is_never_planned_slower_nor_to_write_more(
    plan_sweep: ModuleType,
    model: str,
    ram_gib: tuple[int, ...],
    num_ssds: tuple[int, ...],
    batch: int,
) -> None:
    sweep = plan_sweep.Sweep(
        models=(model,),
        machines=("desktop-4090",),
        ram_gib=ram_gib,
        num_ssds=num_ssds,
        batches=(batch,),
    )
    compared = list(
        plan_sweep.violations(plan_sweep.pairs(sweep), plan_sweep.run(list(sweep.groups()), 1))
    )
    assert compared
    assert [wrong for _, wrong in compared if wrong is not None] == []


def test_what_is_worse_is_found(plan_sweep: ModuleType) -> None:
    sweep = plan_sweep.Sweep(
        models=("gpt-6b",), machines=("desktop-4090",), ram_gib=(32,), num_ssds=(1, 2), batches=(8,)
    )
    cases = [case for group in sweep.groups() for case in group]
    found = {case: plan_sweep.Planned(seconds=1.0, written_bytes=10) for case in cases}
    assert [
        wrong for _, wrong in plan_sweep.violations(plan_sweep.pairs(sweep), found) if wrong
    ] == []
    slower, wears = cases[2], cases[3]
    assert slower.num_ssds == wears.num_ssds == 2
    found[slower] = plan_sweep.Planned(seconds=1.01, written_bytes=10)
    found[wears] = plan_sweep.Planned(seconds=1.0, written_bytes=11)
    kinds = [
        wrong.kind for _, wrong in plan_sweep.violations(plan_sweep.pairs(sweep), found) if wrong
    ]
    assert kinds == ["drives", "drives, writes"]
    found[slower] = None
    assert any(
        wrong is not None and wrong.factor == float("inf")
        for _, wrong in plan_sweep.violations(plan_sweep.pairs(sweep), found)
    )
