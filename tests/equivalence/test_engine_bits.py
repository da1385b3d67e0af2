"""The engine against a plain loop in memory: losses, masters, m and v equal in every bit.

Whatever the RAM, chunk sizes, threads, number of SSDs, micro-batches, and wherever activations
wait. There are 768 combinations of what is varied, about ten minutes of one core for a model. The
fast part takes some in which any two values meet; the slow part some at random of every model and
longer runs; the long one a quarter in which any three values meet, more at random, and all.
"""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan import Plan, Workload, make_plan
from lohan.vocabulary import Choice
from support.engine_runs import MIB, EngineCase, all_cases, assert_same, run_case
from support.pairwise import pairwise
from support.tiny_models import TINY_MODELS

AMPLE, TIGHT = 64 * MIB, 4 * MIB

EVERYTHING: dict[str, list[Any]] = {
    "ram_bytes": [AMPLE, TIGHT],
    "num_ssds": [1, 3],
    "num_micro_batches": [1, 4],
    # Off, always, and in some steps (norms are around 2).
    "max_grad_norm": [None, 1.0, 2.0],
    "choice": [Choice.KEEP, Choice.SWAP_TO_RAM, Choice.SWAP_TO_SSD, Choice.RECOMPUTE],
    "num_parts": [1, 3],
    "num_threads": [1, 2],
    "device": ["cpu", "emulated"],
}


def check(case: EngineCase, directory: Path) -> None:
    if case.ram_bytes == TIGHT:
        # Nothing resident: with tiny models even a tight budget would hold all states.
        case = replace(case, residents=False)
    outcome, expected = run_case(case, directory)
    assert_same(outcome, expected, norms=case.max_grad_norm is not None)


def sampled(model: str, count: int) -> list[EngineCase]:
    cases = all_cases(**EVERYTHING)
    picked = random.Random(model).sample(cases, count)
    return [replace(case, model=model, num_steps=3) for case in picked]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for model in TINY_MODELS for case in sampled(model, 2)], ids=str
)
def test_a_sample_of_all_combinations_changes_no_bit(case: EngineCase, tmp_path: Path) -> None:
    check(case, tmp_path)


PAIRS = [EngineCase(**chosen, num_steps=2) for chosen in pairwise(EVERYTHING)]


def test_any_two_values_meet_in_the_pairs_that_are_run() -> None:
    assert len(PAIRS) <= 20
    for names in itertools.combinations(EVERYTHING, 2):
        met = {tuple(getattr(case, name) for name in names) for case in PAIRS}
        assert met == set(itertools.product(*(EVERYTHING[name] for name in names)))


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_combinations_of_any_two_values_change_no_bit(case: EngineCase, tmp_path: Path) -> None:
    check(case, tmp_path)


def quarter() -> list[EngineCase]:
    """Two rules of parity over four fields each leave a quarter of the combinations; any three
    fields still take all their values together."""
    halves = (
        ("ram_bytes", "num_ssds", "num_micro_batches", "choice"),
        ("max_grad_norm", "num_parts", "num_threads", "device"),
    )
    return [
        case
        for case in all_cases(**EVERYTHING)
        if all(
            sum(EVERYTHING[name].index(getattr(case, name)) for name in names) % 2 == 0
            for names in halves
        )
    ]


def test_any_three_values_meet_in_the_quarter_that_is_run() -> None:
    cases = quarter()
    assert len(cases) * 4 == len(all_cases(**EVERYTHING)) == 768
    for names in itertools.combinations(EVERYTHING, 3):
        met = {tuple(getattr(case, name) for name in names) for case in cases}
        assert met == set(itertools.product(*(EVERYTHING[name] for name in names)))


@pytest.mark.long
@pytest.mark.parametrize("num_parts", EVERYTHING["num_parts"])
@pytest.mark.parametrize("device", EVERYTHING["device"])
def test_combinations_of_any_three_values_change_no_bit(
    device: str, num_parts: int, tmp_path: Path
) -> None:
    for case in quarter():
        if (case.device, case.num_parts) == (device, num_parts):
            check(replace(case, num_steps=2), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("model", TINY_MODELS)
@pytest.mark.parametrize("device", EVERYTHING["device"])
def test_every_combination_changes_no_bit(device: str, model: str, tmp_path: Path) -> None:
    """Ten minutes of one core for a model."""
    for case in all_cases(**EVERYTHING):
        if case.device == device:
            check(replace(case, model=model, num_steps=2), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("model", [name for name in TINY_MODELS if name != "llama"])
def test_a_larger_sample_changes_no_bit_of_other_models(model: str, tmp_path: Path) -> None:
    for case in sampled(model, 12):
        check(case, tmp_path)


def check_twenty_steps(model: str, choice: Choice, directory: Path) -> None:
    """Clipping takes its turn: over the models every choice meets every kind of it."""
    turn = list(TINY_MODELS).index(model) + EVERYTHING["choice"].index(choice)
    norms = EVERYTHING["max_grad_norm"]
    check(
        EngineCase(
            model=model,
            choice=choice,
            num_steps=20,
            num_micro_batches=2,
            num_parts=2,
            device="emulated",
            max_grad_norm=norms[turn % len(norms)],
        ),
        directory,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "choice"), list(zip(TINY_MODELS, itertools.cycle(EVERYTHING["choice"])))
)
def test_twenty_steps_change_no_bit(model: str, choice: Choice, tmp_path: Path) -> None:
    check_twenty_steps(model, choice, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("model", TINY_MODELS)
@pytest.mark.parametrize("choice", EVERYTHING["choice"])
def test_twenty_steps_change_no_bit_in_any_model(
    model: str, choice: Choice, tmp_path: Path
) -> None:
    check_twenty_steps(model, choice, tmp_path)


@pytest.mark.parametrize("policy", ["lohan+", "lohan", "zero-infinity", "zero-offload"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_every_policy_gives_the_same_bits(
    policy: str, max_grad_norm: float | None, tmp_path: Path
) -> None:
    check(EngineCase(policy=policy, max_grad_norm=max_grad_norm, device="emulated"), tmp_path)


@pytest.mark.parametrize("is_clipped", [True, False])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_spilled_gradients_give_the_same_bits(
    device: str, is_clipped: bool, tmp_path: Path
) -> None:
    check(
        EngineCase(
            residents=False,
            spills=True,
            num_parts=3,
            device=device,
            max_grad_norm=1.0 if is_clipped else None,
        ),
        tmp_path,
    )


@pytest.mark.parametrize("spills", [True, False])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_plan_made_for_clipping_gives_the_same_bits_without_it(
    model: str, spills: bool, tmp_path: Path
) -> None:
    """It is a candidate there: every update is put off, those of shared weights too."""

    def policy(machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
        clipped = replace(workload, clips_gradients=True)
        plan = make_plan("lohan+", machine, shape, clipped)
        assert all(block.defers_update for block in plan.blocks)
        return replace(
            plan,
            workload=workload,
            system=replace(plan.system, spills_gradients=spills),
            blocks=tuple(replace(block, residents=frozenset()) for block in plan.blocks),
            gradient_slots=4 if spills else None,
        )

    case = EngineCase(model=model, policy=policy, max_grad_norm=None, device="emulated")
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt2", "t5", "bart", "dit"])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_dropout_draws_the_same_numbers(model: str, num_micro_batches: int, tmp_path: Path) -> None:
    check(
        EngineCase(
            model=model,
            dropout=0.2,
            num_micro_batches=num_micro_batches,
            choice=Choice.SWAP_TO_RAM,
            device="emulated",
        ),
        tmp_path,
    )


@pytest.mark.parametrize("policy", ["lohan+", "lohan"])
def test_fp16_with_loss_scaling_gives_the_same_bits(policy: str, tmp_path: Path) -> None:
    check(EngineCase(dtype=torch.float16, policy=policy, num_steps=6, num_parts=2), tmp_path)


def freeze_first_blocks(model: torch.nn.Module) -> None:
    for parameter in model.get_input_embeddings().parameters():
        parameter.requires_grad_(False)
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad_(False)


def freeze_matrices(model: torch.nn.Module) -> None:
    """As adapters do: every block has few trained parameters beside many frozen ones."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)


@pytest.mark.parametrize("freeze", [freeze_first_blocks, freeze_matrices])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("residents", [None, False])
def test_frozen_parameters_stay_and_the_others_have_the_same_bits(
    freeze: object,
    device: str,
    max_grad_norm: float | None,
    residents: bool | None,
    tmp_path: Path,
) -> None:
    case = EngineCase(device=device, max_grad_norm=max_grad_norm, residents=residents)
    outcome, expected = run_case(case, tmp_path, prepare=freeze)
    assert_same(outcome, expected, norms=max_grad_norm is not None)
    assert set(outcome.moments) == set(expected.masters)


@pytest.mark.slow
@pytest.mark.parametrize("spills", [False, True])
def test_pieces_of_updates_that_overtake_each_other_change_no_bit(
    spills: bool, tmp_path: Path
) -> None:
    """Many steps without a pause: lanes run ahead of each other in ever other ways."""
    check(
        EngineCase(residents=False, spills=spills, num_parts=2, num_steps=30, device="emulated"),
        tmp_path,
    )
