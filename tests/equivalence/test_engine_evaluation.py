"""Losses without gradients: those of the model in memory, and the run goes on as if not asked."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

from lohan.drive.micro_batch import loss_of
from support.engine_runs import EngineCase, attach, batches_of, build, optimizer_for
from support.tiny_models import LOSS_FUNCTIONS


@pytest.mark.parametrize("model", ["llama", "gpt2", "dit"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("is_stepped", [False, True])
def test_evaluating_in_training_mode_draws_the_numbers_of_one_batch_after_the_other(
    model: str, dropout: float, is_stepped: bool, tmp_path: Path
) -> None:
    """As a user does who forgets model.eval(), or wants it so."""
    case = EngineCase(model=model, dropout=dropout, num_micro_batches=3)
    offloaded = build(case)
    twin = copy.deepcopy(offloaded)
    batches = batches_of(case)[0]
    loss_fn = LOSS_FUNCTIONS.get(model)
    with attach(case, offloaded, optimizer_for(case, offloaded), tmp_path) as engine:
        if is_stepped:
            engine.step(batches)
            masters = dict(engine.weights())
            for name, parameter in twin.named_parameters():
                parameter.data.copy_(masters[name])
        torch.manual_seed(11)
        found = engine.evaluate(batches)
        torch.manual_seed(11)
        target = engine.device.torch_device
        twin.to(target)
        batches = tree_map_only(torch.Tensor, lambda leaf: leaf.to(target), batches)
        with torch.no_grad():
            expected = [float(loss_of(twin, batch, loss_fn)) for batch in batches]
        engine.close(should_delete=True)
    assert found == expected


def test_a_scheduler_after_a_step_has_nothing_to_warn_of(tmp_path: Path) -> None:
    case = EngineCase()
    model = build(case)
    optimizer = optimizer_for(case, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    before = schedule.get_last_lr()[0]
    with attach(case, model, optimizer, tmp_path) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(batches_of(case)[0])
        schedule.step()
        engine.close(should_delete=True)
    assert schedule.get_last_lr()[0] < before
