"""Toys driven block by block, and what must not be left behind when that fails."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from lohan.drive import SegmentedModel
from lohan.drive.activations.store import BlockChoices
from lohan.verify.plain_loop import losses_and_gradients
from support.driving_hooks import ComeAndGo, assert_same_gradients, same_bits, twin
from support.keep_store import KeepStore
from support.mapped_segments import map_segments
from support.toy_models import toy_batches

EVERYTHING = BlockChoices(stored=frozenset(range(1000)))
"""All that the backward of any toy reads is stored."""


def drive(
    model: torch.nn.Module, hooks_type: type[ComeAndGo] = ComeAndGo
) -> tuple[SegmentedModel, ComeAndGo, KeepStore]:
    segments = map_segments(model)
    sets = segments.parameter_sets(model)
    hooks, store = hooks_type(segments, sets), KeepStore()
    return SegmentedModel(model, segments, sets=sets, hooks=hooks, store=store), hooks, store


def assert_nothing_left(
    driven: SegmentedModel, hooks: ComeAndGo, store: KeepStore, threads: int, state: torch.Tensor
) -> None:
    assert threading.active_count() == threads
    assert len(store) == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in driven.model.parameters())
    assert all("forward" not in vars(block) for block in driven.model.blocks)
    hooks.abandon()


def drive_with(
    model: torch.nn.Module, choices: BlockChoices
) -> tuple[Callable[..., Any], ComeAndGo, KeepStore]:
    """A step with the same choices for every block, and what it works with."""
    driven, hooks, store = drive(model)
    of_all = {block.id: choices for block in driven.segments.blocks}
    return lambda batches: driven.step(batches, choices=of_all), hooks, store


def drive_kept(
    model: torch.nn.Module,
) -> tuple[Callable[..., Any], ComeAndGo, KeepStore]:
    """A step that stores everything."""
    return drive_with(model, EVERYTHING)


def check_kept(model: torch.nn.Module) -> None:
    """Such steps have the bits of plain training."""
    assert_as_plain(model, EVERYTHING)


def assert_as_plain(
    model: torch.nn.Module,
    choices: BlockChoices,
    *,
    num_steps: int = 2,
    batches: Callable[[], list[dict[str, Any]]] = toy_batches,
) -> None:
    """Steps of some micro-batches have the bits of plain training."""
    plain = twin(model)
    step, hooks, store = drive_with(model, choices)
    for _ in range(num_steps):
        expected_losses, expected = losses_and_gradients(plain, batches())
        hooks.gradients.clear()
        losses = step(batches())
        assert all(map(same_bits, losses, expected_losses))
        assert_same_gradients(hooks.gradients, expected)
        assert len(store) == 0
