"""The driver against plain PyTorch: same losses, same gradients, same random numbers after."""

import functools
import random
from typing import Any

import pytest
import torch

from lohan.drive import SegmentedModel, SegmentMap
from lohan.drive.activations.store import BlockChoices
from lohan.drive.surroundings.ambient import memory_features_off
from lohan.verify.plain_loop import losses_and_gradients
from lohan.vocabulary import BlockId
from support.driving_hooks import (
    ComeAndGo,
    assert_same_gradients,
    same_bits,
    step_with_known_draws,
    twin,
)
from support.keep_store import KeepStore
from support.mapped_segments import map_segments, observe_rest_uses
from support.operator_list import operators_listed
from support.tiny_models import LOSS_FUNCTIONS, TINY_MODELS


def build(name: str, dropout: float, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(7)
    model = TINY_MODELS[name].build(dropout).to(dtype)
    model.train()
    return model


def batches_of(name: str, count: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    return [TINY_MODELS[name].batch(seed, dtype) for seed in range(count)]


@functools.cache
def rest_uses_of(name: str) -> list[list[str]]:
    model, batch = build(name, 0.0, torch.float32), batches_of(name, 1, torch.float32)[0]
    loss_fn = LOSS_FUNCTIONS.get(name)
    run = (lambda: loss_fn(model, batch)) if loss_fn else (lambda: model(**batch))
    return observe_rest_uses(model, TINY_MODELS[name].runs, run)


def segments_of(name: str, model: torch.nn.Module) -> SegmentMap:
    return map_segments(model, TINY_MODELS[name].runs, rest_uses_of(name))


@functools.cache
def storable_of(name: str, dropout: float, dtype: torch.dtype) -> dict[str, list[int]]:
    """Ordinals that may be stored, by block, listed while the plain model runs."""
    model = build(name, dropout, dtype)
    loss_fn = LOSS_FUNCTIONS.get(name)
    with operators_listed(model, TINY_MODELS[name].runs) as listed, memory_features_off(model):
        losses_and_gradients(model, batches_of(name, 1, dtype), loss_fn)
    return {path: [call.ordinal for call in calls] for path, calls in listed.items()}


def choices_of(
    kind: str, name: str, segments: SegmentMap, dropout: float, dtype: torch.dtype
) -> dict[BlockId, BlockChoices]:
    if kind == "recompute":
        return {}
    pick = random.Random(f"{kind} {name} {dropout}")
    choices = {}
    for block in segments.blocks:
        can = storable_of(name, dropout, dtype)[block.name]
        chosen = can if kind == "everything" else [one for one in can if pick.random() < 0.4]
        choices[block.id] = BlockChoices(stored=frozenset(chosen))
    return choices


SLOW = ("qwen3", "bart")  # built of the same parts as llama and t5
COMBINATIONS = [
    pytest.param(
        name,
        dropout,
        dtype,
        num_micro_batches,
        kind,
        marks=[pytest.mark.slow] if name in SLOW and kind != "some" else [],
    )
    for name in TINY_MODELS
    for dropout, dtype, num_micro_batches, kind in [
        (0.0, torch.float32, 1, "recompute"),
        (0.0, torch.bfloat16, 3, "everything"),
        (0.0, torch.float32, 4, "some"),
        (0.2, torch.bfloat16, 1, "some"),
        (0.2, torch.float32, 3, "everything"),
        (0.2, torch.bfloat16, 4, "recompute"),
    ]
]


@pytest.mark.parametrize(
    ("name", "dropout", "dtype", "num_micro_batches", "kind"),
    COMBINATIONS,
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_two_steps_equal_plain_training_bit_for_bit(
    name: str, dropout: float, dtype: torch.dtype, num_micro_batches: int, kind: str
) -> None:
    model = build(name, dropout, dtype)
    plain = twin(model)
    segments = segments_of(name, model)
    sets = segments.parameter_sets(model)
    hooks, store = ComeAndGo(segments, sets), KeepStore()
    driven = SegmentedModel(model, segments, sets=sets, hooks=hooks, store=store)
    batches, loss_fn = batches_of(name, num_micro_batches, dtype), LOSS_FUNCTIONS.get(name)
    choices = choices_of(kind, name, segments, dropout, dtype)

    for step in range(2):
        torch.manual_seed(100 + step)
        expected_losses, expected = losses_and_gradients(plain, batches, loss_fn)
        expected_state, expected_next = torch.get_rng_state(), torch.rand(3)

        torch.manual_seed(100 + step)
        hooks.gradients.clear()
        losses = step_with_known_draws(driven, batches, loss_fn=loss_fn, choices=choices)

        assert all(map(same_bits, losses, expected_losses))
        assert_same_gradients(hooks.gradients, expected)
        assert torch.equal(torch.get_rng_state(), expected_state)
        assert torch.equal(torch.rand(3), expected_next)
        assert len(store) == 0


def test_caches_and_checkpointing_of_the_model_are_put_aside_for_the_step() -> None:
    model = build("llama", 0.0, torch.float32)
    plain = twin(model)
    model.gradient_checkpointing_enable()
    model.config.use_cache = True
    segments = segments_of("llama", model)
    sets = segments.parameter_sets(model)
    hooks = ComeAndGo(segments, sets)
    batches = batches_of("llama", 2, torch.float32)
    SegmentedModel(model, segments, sets=sets, hooks=hooks, store=KeepStore()).step(batches)
    assert_same_gradients(hooks.gradients, losses_and_gradients(plain, batches)[1])
    assert model.config.use_cache
    assert model.is_gradient_checkpointing


def test_eval_mode_is_followed() -> None:
    model = build("gpt2", 0.5, torch.float32).eval()
    plain = twin(model)
    segments = segments_of("gpt2", model)
    sets = segments.parameter_sets(model)
    hooks = ComeAndGo(segments, sets)
    batches = batches_of("gpt2", 3, torch.float32)
    losses = SegmentedModel(model, segments, sets=sets, hooks=hooks, store=KeepStore()).step(
        batches
    )
    expected_losses, expected = losses_and_gradients(plain, batches)
    assert all(map(same_bits, losses, expected_losses))
    assert_same_gradients(hooks.gradients, expected)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_blocks_are_found_where_the_model_has_them(name: str) -> None:
    model = build(name, 0.0, torch.float32)
    blocks = [block.name for block in map_segments(model, None, rest_uses_of(name)).blocks]
    assert blocks == [path for run in TINY_MODELS[name].runs for path in run]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "t5", "dit"])
def test_where_parameters_are_registered_is_where_most_models_use_them(name: str) -> None:
    model = build(name, 0.0, torch.float32)
    for ours, observed in zip(map_segments(model), segments_of(name, model), strict=True):
        assert set(ours.parameters) == set(observed.parameters)
        assert set(ours.borrowed) == set(observed.borrowed)


def test_parameters_registered_elsewhere_are_found_by_running_the_model() -> None:
    """BART registers the norm of its embedding behind its blocks."""
    segments = segments_of("bart", build("bart", 0.0, torch.float32))
    first, head = segments.segments[0], segments.last
    assert "model.encoder.layernorm_embedding.weight" in first.parameters
    assert ("model.shared.weight", first.id) in head.borrowed
