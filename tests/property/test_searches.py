"""The planner's searches against the best choices a solver finds, on small random models."""

import random
import statistics

import pytest

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.paper import policy_named
from lohan.paper.published import activation_ram_bytes
from lohan.plan import Plan, Workload
from lohan.plan.block_costs import planned_load
from support.best_choices import (
    best_estimate,
    best_stage_seconds,
    planned_stage_seconds,
)
from support.random_plans import random_block, random_machine

# docs/cost-model.md states these figures; change both together.
MEDIAN_RATIO = 1.0
SHARE_WITHIN_5_PERCENT = 0.95
WORST_RATIO = 1.25
WORST_PAPER_RATIO = 1.03


def small_case(seed: int, policy: str, *, clips: bool) -> tuple[Plan, Machine] | None:
    """2 to 4 inner blocks of 3 to 5 operators; None where nothing is to be decided."""
    rng = random.Random(seed)
    machine = random_machine(rng)
    kinds = [
        random_block(rng, "embedding", num_operators=1),
        random_block(rng, "block", num_operators=rng.randint(3, 5)),
        random_block(rng, "other", num_operators=rng.randint(3, 5)),
        random_block(rng, "head", num_operators=1),
    ]
    inner = [rng.choice((1, 1, 2)) for _ in range(rng.randint(2, 4))]
    shape = ModelShape(name="small", kinds=tuple(kinds), sequence_of_kinds=(0, *inner, 3))
    workload = Workload(
        batch=machine.num_gpus * rng.choice((1, 2, 4)),
        sequence=rng.choice((1024, 8192)),
        clips_gradients=clips and rng.random() < 0.3,
    )
    if shape.num_parameters < 10**6:
        return None
    plan = policy_named(policy).plan(machine, shape, workload)
    return (plan, machine) if plan.ledger.fits or policy != "lohan+" else None


@pytest.mark.slow
def test_our_search_is_close_to_the_best_choices_there_are() -> None:
    ratios = []
    for seed in range(160):
        case = small_case(seed, "lohan+", clips=True)
        if case is None:
            continue
        best = best_estimate(*case)
        assert best is not None, f"seed {seed}: the plan fits, so there are choices that fit"
        ratios.append(planned_load(*case).estimated_seconds / best)
    assert len(ratios) > 80
    # Nothing beats the optimum but for the solver's tolerance.
    assert min(ratios) > 0.999
    assert statistics.median(ratios) == pytest.approx(MEDIAN_RATIO, abs=0.001)
    assert sum(ratio < 1.05 for ratio in ratios) >= SHARE_WITHIN_5_PERCENT * len(ratios)
    assert max(ratios) <= WORST_RATIO


def test_the_published_search_is_the_best_prefix_and_nearly_the_best_choice() -> None:
    ratios = []
    for seed in range(120):
        case = small_case(seed, "lohan", clips=False)
        if case is None:
            continue
        plan, machine = case
        ram_bytes = activation_ram_bytes(plan.system, machine, plan.shape)
        best = best_stage_seconds(plan, machine, ram_bytes)
        assert best is not None
        ratios.append(planned_stage_seconds(plan, machine) / best)
    assert len(ratios) > 60
    assert min(ratios) > 0.999
    assert statistics.median(ratios) == pytest.approx(1.0, abs=1e-6)
    assert max(ratios) <= WORST_PAPER_RATIO
