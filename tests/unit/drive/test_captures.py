"""What a captured block depends on, and how many are remembered."""

from dataclasses import replace

import torch
from torch.utils._pytree import tree_flatten

from lohan.drive import SegmentedModel
from lohan.drive.block_run import BlockRunner
from lohan.drive.block_visit import BlockCall
from lohan.drive.captured.graphs import MOST_WAYS, Captures, settings_of
from lohan.drive.edges.cuts import PendingGradients
from lohan.drive.edges.entries import EntryKeys
from lohan.drive.surroundings.ambient import Ambient
from lohan.drive.surroundings.randomness import Generators
from lohan.drive.watch.own_attributes import AttributeBook, OwnAttributes
from lohan.drive.weights.parameter_views import Weights
from lohan.verify.plain_loop import losses_and_gradients
from lohan.vocabulary import BlockId
from support.driven_toys import EVERYTHING
from support.driving_hooks import ComeAndGo, assert_same_gradients, twin
from support.keep_store import KeepStore
from support.mapped_segments import map_segments
from support.toy_models import WIDTH, Toy, ToyBlock, toy_batches


def test_graphs_of_shapes_not_met_for_long_are_let_go_of() -> None:
    module = ToyBlock()
    captures = Captures()
    runner = BlockRunner(
        block=BlockId(1),
        name="block",
        module=module,
        store=KeepStore(),
        generators=Generators([torch.device("cpu")]),
        weights=Weights([]),
        parameters=list(module.parameters()),
        captures=captures,
        outside={},
    )
    runner.begin_step()
    attributes = OwnAttributes(AttributeBook([], 1), 0)
    ambient = Ambient.here(("cpu",))
    for rows in [*range(1, MOST_WAYS + 10), MOST_WAYS + 9]:
        x = torch.randn(rows, WIDTH, requires_grad=True)
        leaves, spec = tree_flatten(((x,), {}))
        call = BlockCall(forward=module.forward, leaves=leaves, spec=spec, ambient=ambient)
        _, visit = runner.forward(
            call, micro_batch=0, choices=EVERYTHING, keys=EntryKeys(), attributes=attributes
        )
        assert visit is not None
        pending = PendingGradients()
        assert visit.exits[0] is not None
        pending.put(visit.exits[0], torch.ones(rows, WIDTH))
        with runner.in_place():
            runner.backward(
                visit,
                pending=pending,
                take_gradient=lambda *_: None,
                should_check=False,
                on_recomputed=lambda: None,
            )
    ways = captures.trust("block")
    assert len(ways) == MOST_WAYS
    assert [one.graph is not None for one in ways.values()] == [False] * (MOST_WAYS - 1) + [True]


def test_what_a_capture_depends_on_in_attributes() -> None:
    block = ToyBlock()
    modules = list(block.modules())
    block.sizes, block.rates, block.layer_idx = [1, 2], {"low": 0.1}, 3
    before, reason = settings_of(modules)
    assert reason is None
    assert settings_of(modules)[0] == before
    block.layer_idx = 4
    assert settings_of(modules)[0] == before
    for change in (
        lambda: block.sizes.append(3),
        lambda: block.rates.update(low=0.2),
        lambda: setattr(block, "scale", 2.0),
        lambda: block.up.eval(),
        lambda: block.up.weight.requires_grad_(False),
    ):
        change()
        after, _ = settings_of(modules)
        assert after != before
        before = after
    block.up.register_forward_hook(lambda *_: None)
    assert settings_of(modules)[1] == "a hook is on its Linear"


def test_operators_other_than_planned_are_told_and_recomputed() -> None:
    model = Toy(lambda _: ToyBlock())
    plain, segments, captures = twin(model), map_segments(model), Captures()
    sets = segments.parameter_sets(model)
    hooks = ComeAndGo(segments, sets)
    driven = SegmentedModel(
        model, segments, sets=sets, hooks=hooks, captures=captures, store=KeepStore()
    )
    planned_for_others = replace(EVERYTHING, names={1: "convolution"})
    choices = {block.id: planned_for_others for block in segments.blocks}
    for _ in range(2):
        hooks.gradients.clear()
        driven.step(toy_batches(2), choices=choices)
        assert_same_gradients(hooks.gradients, losses_and_gradients(plain, toy_batches(2))[1])
    (sentence,) = captures.news()
    assert sentence.startswith("3 blocks from blocks.0 on: other operators run than were planned")
    assert captures.news() == []
    assert captures.report() == [f"blocks.{number}: captured" for number in range(3)]
