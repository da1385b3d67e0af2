"""Traces that tests remember are those that would be made anew, of nothing but the same."""

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lohan.engine.planning.traced_model import TracedModel
from lohan.model.shape import ModelShape
from lohan.model.tracing import trace_model
from lohan.model.tracing.trace_model import TraceableModel
from support import remembered_traces
from support.remembered_traces import remember_traces
from support.tiny_models import LOSS_FUNCTIONS, TINY_MODELS

Change = Callable[[torch.nn.Module], object]


def built(name: str) -> torch.nn.Module:
    torch.manual_seed(7)
    return TINY_MODELS[name].build(0.0).to(torch.bfloat16).train()


def traced(name: str, model: torch.nn.Module, batch: dict[str, Any] | None = None) -> TracedModel:
    return TracedModel(
        model,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        example=batch or TINY_MODELS[name].batch(0, torch.bfloat16),
        loss_fn=LOSS_FUNCTIONS.get(name),
    )


def shape(name: str, made: TracedModel) -> ModelShape:
    return made.shape(made.smallest_sizes, [TINY_MODELS[name].batch(0, torch.bfloat16)])


def told(made: TracedModel, model: torch.nn.Module) -> list[Any]:
    """All that is read of a trace, with names in place of a model's own objects."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (
            *(one.label, one.input_bytes, one.output_bytes, one.num_tokens, one.side_bytes),
            *(one.is_used, one.segment.num_calls, one.block and one.block.name),
            one.block is None or one.block.module is model.get_submodule(one.block.name),
            sorted(names[known] for known in one.parameters),
        )
        for one in made.stretches
    ] + [made.changed_buffers]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per trace that was really made."""
    made: list[int] = []
    real = remembered_traces._trace

    def counted(self: TraceableModel, *args: Any, **named: Any) -> Any:
        made.append(1)
        return real(self, *args, **named)

    monkeypatch.setattr(remembered_traces, "_trace", counted)
    monkeypatch.setattr(remembered_traces, "_TRACED", {})
    return made


QUICK = ("llama", "gpt2", "dit")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TINY_MODELS],
)
def test_a_remembered_trace_is_the_one_made_anew(
    name: str, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(name)
    anew = traced(name, model)
    expected = told(anew, model), shape(name, anew)
    remember_traces(monkeypatch)
    for number in range(2):
        again = built(name)
        made = traced(name, again)
        assert (told(made, again), shape(name, made)) == expected
        assert len(runs) == 1, f"of the model built as number {number}"


def test_whether_first_labels_count_is_remembered_too(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = TINY_MODELS["llama"].batch(0, torch.bfloat16)
    expected = traced("llama", built("llama")).counts_first_label(batch, None)
    remember_traces(monkeypatch)
    for _ in range(2):
        assert traced("llama", built("llama")).counts_first_label(batch, None) is expected
    assert len(runs) == 2


def scaled(module: Any, args: Any, output: Any) -> Any:
    return output * 2


def hooked(model: torch.nn.Module) -> None:
    model.get_submodule("model.layers.0.mlp").register_forward_hook(scaled)


CHANGES: dict[str, Change] = {
    "it is frozen in part": lambda model: next(model.parameters()).requires_grad_(False),
    "it is in its other mode": lambda model: model.eval(),
    "it has a hook": hooked,
    "a setting": lambda model: setattr(model.get_submodule("model.layers.0"), "extra", 1.5),
    "its configuration": lambda model: setattr(model.config, "pretraining_tp", 2),
    "a class": lambda model: setattr(
        model.get_submodule("model.layers.1"), "mlp", torch.nn.Linear(16, 16)
    ),
    "a buffer's values": lambda model: next(model.buffers()).mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_differs_is_traced_anew(
    change: str, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_traces(monkeypatch)
    traced("llama", built("llama"))
    other = built("llama")
    CHANGES[change](other)
    traced("llama", other)
    assert len(runs) == 2


def test_other_inputs_are_traced_anew(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    remember_traces(monkeypatch)
    for seed in (0, 1):
        traced("llama", built("llama"), TINY_MODELS["llama"].batch(seed, torch.bfloat16))
    assert len(runs) == 2


def test_a_class_whose_forward_was_replaced_is_traced_anew(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_traces(monkeypatch)
    model = built("llama")
    traced("llama", model)
    kind: Any = type(model.get_submodule("model.layers.0.mlp"))
    before = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: before(self, x) * 2)
    traced("llama", built("llama"))
    assert len(runs) == 2


def test_a_trace_that_drew_from_pythons_generator_is_not_remembered(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_traces(monkeypatch)
    for _ in range(2):
        model = built("llama")
        model.get_submodule("model.layers.0").register_forward_pre_hook(
            lambda *_: random.random() and None
        )
        traced("llama", model)
    assert len(runs) == 2


def test_the_arguments_of_a_trace_are_those_that_are_described() -> None:
    """A new one would have to be written down too."""
    own = inspect.signature(remembered_traces._remembering).parameters
    assert list(own) == list(inspect.signature(trace_model.TraceableModel.run).parameters)
