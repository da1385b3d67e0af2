"""Captured blocks in the engine, with every output kept, swapped or recomputed.

Weights leave in between and come back elsewhere; the emulated device poisons the memory they left,
so a stale weight would be a wrong bit.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lohan.hardware.machine import Machine
from lohan.model.shape import ModelShape
from lohan.plan import make_plan
from lohan.plan.plan import Plan
from lohan.plan.workload import Workload
from lohan.vocabulary import Choice
from support.block_backwards import count_backwards
from support.engine_runs import (
    EngineCase,
    assert_same,
    run_case,
)
from support.tiny_models import TINY_MODELS

NUM_BLOCKS = {"t5": 5, "bart": 4}
"""Of the tiny models; 3 of those not named."""


@pytest.mark.parametrize(
    ("device", "num_micro_batches", "max_grad_norm"),
    # Any two values meet.
    [("cpu", 1, None), ("cpu", 4, 1.0), ("emulated", 1, 1.0), ("emulated", 4, None)],
)
@pytest.mark.parametrize("model", TINY_MODELS)
def test_captured_blocks_change_no_bit(
    model: str,
    device: str,
    num_micro_batches: int,
    max_grad_norm: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = count_backwards(monkeypatch)
    # Dropout takes turns with clipping: the two have nothing to do with each other.
    case = EngineCase(
        model=model,
        choice=Choice.KEEP,
        residents=False,
        device=device,
        num_micro_batches=num_micro_batches,
        max_grad_norm=max_grad_norm,
        dropout=0.2 if max_grad_norm is None else 0.0,
        num_steps=3,
    )
    outcome, expected = run_case(case, tmp_path)
    assert_same(outcome, expected, norms=max_grad_norm is not None)
    one_step = num_micro_batches * NUM_BLOCKS.get(model, 3)
    assert (counts.num_captured, counts.num_again) == (2 * one_step, one_step)


def test_outputs_that_go_to_ram_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_backwards(monkeypatch)
    case = EngineCase(choice=Choice.SWAP_TO_RAM, num_micro_batches=2)
    assert_same(*run_case(case, tmp_path))
    assert_same(*run_case(replace(case, device="emulated"), tmp_path))
    assert (counts.num_captured, counts.num_again) == (2 * 3 * 2 * 3, 2 * 2 * 3)


def freeze_matrices(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_captured_blocks_of_a_frozen_model_change_no_bit(
    device: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_backwards(monkeypatch)
    case = EngineCase(
        model=model, choice=Choice.KEEP, device=device, num_micro_batches=2, residents=False
    )
    assert_same(*run_case(case, tmp_path, prepare=freeze_matrices))
    assert (counts.num_captured, counts.num_again) == (3 * 2 * 3, 2 * 3)


def mixed(machine: Machine, shape: ModelShape, workload: Workload) -> Plan:
    """Of three blocks one is kept, one swapped, one recomputed."""
    plan = make_plan("lohan+", machine, shape, workload)
    blocks = list(plan.blocks)
    saved = tuple(op.index for op in shape.blocks[1].operators if op.is_saved)
    for number, choice in ((1, Choice.SWAP_TO_SSD), (2, Choice.KEEP)):
        blocks[number] = replace(
            blocks[number], input_choice=choice, choices=tuple((op, choice) for op in saved)
        )
    blocks[3] = replace(blocks[3], input_choice=Choice.KEEP, choices=())
    return replace(plan, blocks=tuple(replace(one, residents=frozenset()) for one in blocks))


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_blocks_with_different_choices_go_together(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_backwards(monkeypatch)
    case = EngineCase(device=device, num_micro_batches=2, policy=mixed)
    assert_same(*run_case(case, tmp_path))
    assert (counts.num_captured, counts.num_again) == (3 * 2 * 3, 2 * 3)
