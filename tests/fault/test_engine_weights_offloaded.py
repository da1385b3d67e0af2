"""Computing with a model between steps, or saving it, is refused: its weights are offloaded."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan.errors import ConfigError
from support.engine_faults import everything_moves
from support.engine_runs import attach, batches_of, build, optimizer_for


def assert_refused(model: torch.nn.Module, batch: dict[str, Any]) -> None:
    calls = [
        lambda: model(**batch),
        lambda: model.get_submodule("model")(input_ids=batch["input_ids"]),
        lambda: model.generate(batch["input_ids"], max_new_tokens=1),  # type: ignore[operator]
        model.state_dict,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="weights are offloaded") as caught:
            call()
        assert "engine.evaluate()" in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_model_is_not_computed_with_while_its_weights_are_away(
    device: str, tmp_path: Path
) -> None:
    case = everything_moves(device)
    steps = batches_of(case)
    model = build(case)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        assert_refused(model, steps[0][0])
        before = engine.evaluate(steps[0])
        engine.step(steps[0])
        assert_refused(model, steps[0][0])
        engine.step(steps[1])
    assert_refused(model, steps[0][0])

    model.load_state_dict(values, assign=True)
    model.to("cpu")
    with torch.no_grad():
        assert model(**steps[0][0]).loss.item() == pytest.approx(before[0], rel=0.05)

    # Another engine on the same model: what the first left does not stand in its way.
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        assert engine.evaluate(steps[0]) == before
        assert_refused(model, steps[0][0])


class Around(torch.nn.Module):
    """A model that is part of another one."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


@pytest.mark.parametrize("make", [copy.deepcopy, Around])
def test_a_copy_of_a_model_and_one_around_it_can_be_trained_in_their_turn(
    make: Callable[[torch.nn.Module], torch.nn.Module], tmp_path: Path
) -> None:
    case = everything_moves("cpu")
    (batches, *_) = batches_of(case)
    model = build(case)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with attach(case, model, optimizer_for(case, model), tmp_path) as engine:
        before = engine.evaluate(batches)
    with pytest.raises(ConfigError, match="weights are offloaded"):
        copy.deepcopy(model)
    model.load_state_dict(values, assign=True)
    other = make(model)
    with attach(case, other, optimizer_for(case, other), tmp_path) as engine:
        assert engine.evaluate(batches) == before
        engine.step(batches)
        with pytest.raises(ConfigError, match="weights are offloaded"):
            other(**batches[0])
