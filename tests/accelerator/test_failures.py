"""Kernels that fail after their calls have returned: what is told, and what is left of the run."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.engine.engine import Engine
from lohan.errors import HardwareError, LohanError
from lohan.vocabulary import Choice
from support import accelerator
from support.accelerator_cases import on_accelerator
from support.engine_runs import (
    EngineCase,
    attach,
    batches_of,
    build,
    optimizer_for,
    plain_run,
)

CASE = replace(
    on_accelerator(model="llama_packed", choice=Choice.SWAP_TO_SSD, num_micro_batches=2),
    num_steps=2,
)


def fails_in(block: int, *, is_backward: bool) -> Any:
    """A hook by which a kernel of one block fails, some time after it was queued."""

    def hook(module: torch.nn.Module, *values: Any) -> None:
        accelerator.calls().fail(f"an illegal memory access in block {block}")

    def put(model: torch.nn.Module) -> Any:
        layer = model.get_submodule(f"model.layers.{block}")
        if is_backward:
            return layer.register_full_backward_hook(hook)
        return layer.register_forward_hook(hook)

    return put


def told(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def started(case: EngineCase, model: torch.nn.Module, place: Path) -> Engine:
    return attach(case, model, optimizer_for(case, model), place)


@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize("is_backward", [False, True])
def test_the_first_failure_is_told_with_its_task_and_the_run_goes_on_from_its_seal(
    block: int, is_backward: bool, tmp_path: Path
) -> None:
    model = build(CASE)
    twin, again = copy.deepcopy(model), copy.deepcopy(model)
    engine = started(CASE, model, tmp_path)
    first, second = batches_of(CASE)
    engine.step(first)
    engine.seal()
    fails_in(block, is_backward=is_backward)(model)
    with pytest.raises(HardwareError) as caught:
        engine.step(second)
    words = told(caught.value)
    assert f"an illegal memory access in block {block}" in words
    assert re.search(r"^in .* of pass 2 \(counted from 0\) on lane ", words, re.MULTILINE), words
    assert isinstance(caught.value.__cause__, torch.AcceleratorError)
    run = engine.run_id
    engine.close()
    accelerator.reset()  # a process that was started again

    with attach(CASE, again, optimizer_for(CASE, again), tmp_path, run=run) as engine:
        found = engine.step(second)
        masters = {name: master.clone() for name, master in engine.weights()}
        expected = plain_run(CASE, engine, twin)
        engine.close(should_delete=True)
    assert list(found.losses) == expected.losses[1]
    for name, master in expected.masters.items():
        assert torch.equal(masters[name].view(torch.int32), master.view(torch.int32)), name


def test_nothing_masks_the_failure_when_the_engine_is_left_by_it(tmp_path: Path) -> None:
    """As in a script: the `with` block ends by the error, and closing meets a failed device."""
    model = build(CASE)
    engine = started(CASE, model, tmp_path)
    fails_in(1, is_backward=False)(model)
    with pytest.raises(HardwareError, match="an illegal memory access in block 1"), engine:
        engine.step(batches_of(CASE)[0])


def test_a_failed_engine_says_so_again(tmp_path: Path) -> None:
    model = build(CASE)
    engine = started(CASE, model, tmp_path)
    fails_in(1, is_backward=True)(model)
    with pytest.raises(HardwareError):
        engine.step(batches_of(CASE)[0])
    with pytest.raises(LohanError, match="an illegal memory access in block 1"):
        engine.step(batches_of(CASE)[1])
    engine.close(should_delete=True)
