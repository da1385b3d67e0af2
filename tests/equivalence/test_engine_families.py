"""Families with habits of their own (outputs collected by hooks, tables made when first needed),
trained on all that they give out with several micro-batches: as in memory to the bit.

`--long` runs all families, in ten minutes; every push a few.
"""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.vocabulary import Choice
from support.engine_faults import differing, states_of
from support.engine_runs import EngineCase, optimizer_for
from support.families import FAMILIES
from support.odd_runs import plain, start, states_in_memory

NUM_STEPS = 3
QUICK = [
    ("llama", 2, Choice.RECOMPUTE),
    ("clip", 2, Choice.SWAP_TO_RAM),
    ("siglip", 3, None),
    ("qwen3-moe", 3, Choice.KEEP),
    ("z-image", 2, None),
]
CHOICES = (None, Choice.KEEP, Choice.RECOMPUTE, Choice.SWAP_TO_RAM)


def cases() -> list[Any]:
    """Of those that take long together, a few on every push."""
    every = itertools.product(FAMILIES, (1, 2, 3), CHOICES)
    return [*QUICK, *(pytest.param(*one, marks=pytest.mark.long) for one in every)]


@pytest.mark.parametrize(("name", "count", "choice"), cases())
def test_a_family_trains_as_in_memory(
    name: str, count: int, choice: Choice | None, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    case = EngineCase(choice=choice, residents=False, num_micro_batches=count)
    torch.manual_seed(3)
    model = family.build().to(torch.bfloat16).train()
    twin = copy.deepcopy(model)
    steps = [[family.batch(10 * step + one) for one in range(count)] for step in range(NUM_STEPS)]
    shares = [(1 + one) / (count * (count + 1) / 2) for one in range(count)]
    optimizer = optimizer_for(case, model)
    with start(case, model, optimizer, tmp_path, steps[0][0], loss_fn=family.loss_fn) as engine:
        torch.manual_seed(5)
        losses = [list(engine.step(batches, weights=shares).losses) for batches in steps]
        torch.manual_seed(5)
        expected = plain(
            case, engine, twin, steps, loss_fn=family.loss_fn, weights=lambda _: shares
        )
        assert losses == expected.losses
        assert not differing(states_of(engine), states_in_memory(expected))
