"""Reduction groups on one rank, against a plain loop whose groups are summed in fp32."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.engine_runs import MIB, EngineCase, assert_same, run_case
from support.pairwise import pairwise

CASES = pairwise(
    {
        "model": ["llama", "gpt2", "t5", "dit"],
        "groups": [2, 4],
        "num_micro_batches": [3, 4, 8],
        "max_grad_norm": [None, 1.0],
        "dropout": [0.0, 0.2],
        "device": ["cpu", "emulated"],
        "spills": [None, True],
    }
)


@pytest.mark.parametrize("values", CASES, ids=str)
def test_groups_are_summed_in_fp32(values: dict[str, object], tmp_path: Path) -> None:
    groups, spills = values.pop("groups"), values.pop("spills")
    case = replace(
        EngineCase(num_steps=3, ram_bytes=64 * MIB, options={"reduction_groups": groups}),
        **values,  # type: ignore[arg-type]
    )
    if spills and case.max_grad_norm is not None:
        case = replace(case, spills=True, num_parts=3, residents=False)
    outcome, expected = run_case(case, tmp_path)
    assert_same(outcome, expected, norms=case.max_grad_norm is not None)


def test_overflows_of_fp16_are_found_in_the_sum(tmp_path: Path) -> None:
    case = EngineCase(
        num_steps=3,
        num_micro_batches=4,
        dtype=torch.float16,
        options={"reduction_groups": 2},
    )
    outcome, expected = run_case(case, tmp_path)
    assert_same(outcome, expected)


def test_frozen_parameters_have_no_gradient_in_any_group(tmp_path: Path) -> None:
    def freeze(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "embed" in name or "layers.1.mlp" in name:
                parameter.requires_grad_(False)

    case = EngineCase(num_steps=3, num_micro_batches=3, options={"reduction_groups": 2})
    outcome, expected = run_case(case, tmp_path, freeze)
    assert_same(outcome, expected)
