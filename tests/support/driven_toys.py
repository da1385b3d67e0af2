"""Toys driven block by block, and what must not be left behind when that fails."""

import threading

import torch

from lohan.runtime.segments import SegmentedModel, map_segments
from lohan.runtime.swap_modes import KeepStore
from support.plain_training import ComeAndGo


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
