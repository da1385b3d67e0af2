"""Choices made from a traced shape, as a planner makes them, against plain PyTorch.

The planner's tracer and the captured graph number the operators of a block alike.
"""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lohan.drive import SegmentedModel, segments_from_trace
from lohan.drive.activations.store import BlockChoices
from lohan.model.assemble import trace_shape
from lohan.model.shape import BlockShape, ModelShape
from lohan.model.tracing.trace_model import TraceableModel
from lohan.verify.plain_loop import losses_and_gradients
from support.driving_hooks import ComeAndGo, assert_same_gradients, same_bits, twin
from support.keep_store import KeepStore
from support.tiny_models import LOSS_FUNCTIONS, TINY_MODELS, VOCABULARY


def causal_inputs(batch: int, sequence: int) -> dict[str, Any]:
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def dit_inputs(batch: int, sequence: int) -> dict[str, Any]:
    return {"pixels": torch.zeros(batch, 6, 4), "time": torch.zeros(batch, 8)}


def causal_batch(seed: int) -> dict[str, Any]:
    tokens = torch.randint(
        2, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.long
    )
    return {"input_ids": tokens, "labels": tokens}


INPUTS: dict[str, tuple[Callable[[int, int], dict[str, Any]], bool]] = {
    "llama": (causal_inputs, False),
    "gpt2": (causal_inputs, False),
    "t5": (causal_inputs, False),
    "dit": (dit_inputs, True),
}


def planned(block: BlockShape, share: float, pick: random.Random) -> BlockChoices:
    """Store some of what autograd keeps."""
    stored = {one.index for one in block.operators if one.is_saved and pick.random() < share}
    return BlockChoices(
        stored=frozenset(stored),
        names={
            one.index: one.name.rpartition("/")[2].rpartition("+")[2] for one in block.operators
        },
    )


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(5)
    return TINY_MODELS[name].build(0.0).train()


@functools.cache
def shape_of(name: str) -> ModelShape:
    make_inputs, is_fixed = INPUTS[name]
    return trace_shape(
        build(name),
        make_inputs,
        name=name,
        dtype=torch.float32,
        longest_sequence=32,
        is_sequence_fixed=is_fixed,
    )


def drive(name: str, model: torch.nn.Module) -> tuple[SegmentedModel, ComeAndGo, KeepStore]:
    traceable = TraceableModel(
        model, dtype=torch.float32, device=torch.device("cpu"), should_assume_flash=False
    )
    segments = segments_from_trace(model, traceable.run(INPUTS[name][0], (2, 8)))
    sets = segments.parameter_sets(model)
    hooks, store = ComeAndGo(segments, sets), KeepStore()
    return SegmentedModel(model, segments, sets=sets, hooks=hooks, store=store), hooks, store


@pytest.mark.parametrize(
    "name",
    ["gpt2", "dit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "t5"))],
)
def test_plans_from_a_traced_shape_change_no_bit(name: str) -> None:
    model, loss_fn = build(name), LOSS_FUNCTIONS.get(name)
    make_batch = TINY_MODELS[name].batch if name == "dit" else lambda seed, _: causal_batch(seed)
    batches = [make_batch(seed, torch.float32) for seed in range(3)]
    expected_losses, expected = losses_and_gradients(twin(model), batches, loss_fn)
    driven, hooks, store = drive(name, model)
    shape, pick = shape_of(name), random.Random(name)
    assert len(driven.segments.segments) == len(shape.sequence_of_kinds)
    for share in (0.0, 0.5, 1.0):
        choices = {
            block.id: planned(shape.kinds[shape.sequence_of_kinds[block.id]], share, pick)
            for block in driven.segments.blocks
        }
        hooks.gradients.clear()
        losses = driven.step(batches, loss_fn, choices=choices)
        assert all(map(same_bits, losses, expected_losses))
        assert_same_gradients(hooks.gradients, expected)
        assert len(store) == 0
